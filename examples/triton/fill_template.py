"""Fills in the ${names} of a model's config.pbtxt, as TensorRT-LLM's fill_template.py.

python examples/triton/fill_template.py -i REPO/specdec/config.pbtxt engine_dir:DIR,max_beam_width:1

Every value is held against what the backends can do: one that they cannot is refused, and one that
has no effect is accepted with a line on stderr. Names that are not given stay as they are, which
is their default. Without arguments the script lists the parameters.
"""

from __future__ import annotations

import argparse
import re
import string
import sys
from pathlib import Path

from specdec_ext.errors import SpecdecError
from specdec_ext.serve.triton.parameters import PARAMETERS, check_value


def read_values(text: str) -> dict[str, str]:
    """name:value,name:value; a value may hold commas, since what follows one without a colon
    belongs to the value in front of it (gpu_device_ids:1,2)."""
    values: dict[str, str] = {}
    name = ""
    for word in filter(None, text.split(",")):
        key, colon, value = word.partition(":")
        if colon and re.fullmatch(r"[a-z_]+", key):
            name = key
            values[name] = value
        elif name:
            values[name] += "," + word
        else:
            raise SystemExit(f"{word!r}: expected name:value,name:value")
    return values


def fill(path: Path, values: dict[str, str]) -> None:
    text = path.read_text(encoding="utf-8")
    known = set(re.findall(r"\$\{(\w+)\}", text))
    for name, value in values.items():
        note = check_value(name, value)
        if name not in known:
            note = f"{path.parent.name}/{path.name} has no such parameter, or it is filled in"
        if note:
            print(f"without effect here: {name}:{value} ({note})", file=sys.stderr)
        if any(mark in value for mark in '"\\\n'):
            raise SystemExit(f"{name}:{value}: quotes and backslashes cannot be written")
    path.write_text(string.Template(text).safe_substitute(values), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-i", "--in_place", metavar="FILE", type=Path, help="the config.pbtxt")
    parser.add_argument("values", nargs="?", default="", help="name:value,name:value")
    args = parser.parse_args()
    if args.in_place is None:
        for name, parameter in PARAMETERS.items():
            print(f"{name:34}{parameter.note}".rstrip())
        return 0
    try:
        fill(args.in_place, read_values(args.values))
    except (SpecdecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if code := main():
        sys.exit(code)
