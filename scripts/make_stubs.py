"""Generates python/specdec_ext/_core.pyi from the built module; --check fails if it is stale."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "python" / "specdec_ext" / "_core.pyi"


def generate() -> str:
    """Returns the stub text of the installed module, formatted."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pybind11_stubgen", "specdec_ext._core", "-o", folder],
            check=True,
            capture_output=True,
            text=True,
        )
        text = (Path(folder) / "specdec_ext" / "_core.pyi").read_text()
    # Version strings and build-specific reprs would make the file depend on the machine.
    text = re.sub(r"^__version__: str = .*$", "__version__: str", text, flags=re.MULTILINE)
    # pybind11 knows py::dict, py::list and py::tuple without what they hold.
    text = re.sub(r"((?:->|:) )dict\b(?!\[)", r"\1dict[str, typing.Any]", text)
    text = re.sub(r"((?:->|:) )list\b(?!\[)", r"\1list[typing.Any]", text)
    text = re.sub(r"((?:->|:) )tuple\b(?!\[)", r"\1tuple[typing.Any, ...]", text)
    if re.search(r"(?:->|:) \.\.\.(?=[,)])", text):
        raise SystemExit("a binding names a type before it is registered: see cpp/bind/module.cc")
    for command in (["check", "--fix", "--quiet", "--select", "I,RUF022"], ["format", "--quiet"]):
        text = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(STUB), "-"],
            input=text,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--stub", type=Path, default=STUB, help="the file to write or compare")
    args = parser.parse_args()
    text = generate()
    if not args.check:
        args.stub.write_text(text)
        return 0
    if not args.stub.exists() or args.stub.read_text() != text:
        print(f"{args.stub} is stale: run `make stubs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
