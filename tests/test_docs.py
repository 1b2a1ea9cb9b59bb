"""The documents: links resolve, examples run, commands exist; the tree: no leaks, no loose ends."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("benchmarks/*.md")])
TEXT_SUFFIXES = {
    *(".cc", ".cfg", ".clang-format", ".cmake", ".cu", ".cuh", ".editorconfig", ".gitignore"),
    *(".h", ".json", ".jsonl", ".md", ".py", ".pyi", ".sh", ".toml", ".txt", ".yaml", ".yml", ""),
}
# Where links may lead. Package registries and mirrors are the installer's configuration, not ours.
# www.w3.org names the XML namespace of SVG.
HOSTS = {
    "arxiv.org", "dmlc.github.io", "github.com", "huggingface.co", "www.apache.org", "www.w3.org",
}  # fmt: skip


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tracked() -> list[Path]:
    """Text files of the repository, those about to be added included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [ROOT / line for line in listing.splitlines()]
    return [f for f in files if f.is_file() and f.suffix in TEXT_SUFFIXES]


# -- reading a page -------------------------------------------------------------------------------


def fences(text: str) -> Iterator[tuple[str, str]]:
    """(language, content) of the fenced blocks of a page."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield match.group(1), match.group(2)


def code_lines(text: str) -> Iterator[str]:
    """Lines of fenced and indented code that are commands, backslash continuations joined."""
    for language, block in fences(text):
        if language in ("", "sh", "bash", "console", "shell"):
            yield from block.replace("\\\n", " ").splitlines()
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for match in re.finditer(r"^ {4}(\S.*)$", outside.replace("\\\n", " "), re.MULTILINE):
        yield match.group(1)


def anchors(text: str) -> set[str]:
    """Fragment names of a page's headings, as GitHub makes them."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = set()
    for title in re.findall(r"^#+ (.+)$", outside, re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        found.add(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return found


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of `text`, which stands at `page`, that lead nowhere."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, fragment = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists():
            broken.append(target)
        elif fragment and file.suffix == ".md":
            there = text if file == page else file.read_text()
            if fragment not in anchors(there):
                broken.append(target)
    return broken


def make_targets_named(text: str) -> set[str]:
    """Targets named as code: `make x` inline, or a line of a code block that starts with it."""
    named = set(re.findall(r"`make ([a-z][a-z-]*)", text))
    for line in code_lines(text):
        named |= set(re.findall(r"^(?:\$ )?make ([a-z][a-z-]*)", line.strip()))
    return named


def python_blocks() -> list[tuple[str, str]]:
    blocks = []
    for page in PAGES:
        found = [body for language, body in fences(page.read_text()) if language == "python"]
        blocks += [(f"{name_of(page)}:{i}", body) for i, body in enumerate(found)]
    return blocks


def specdec_commands() -> list[tuple[str, str]]:
    commands = []
    for page in PAGES:
        for line in code_lines(page.read_text()):
            line = line.strip().removeprefix("$ ")
            if line.startswith("specdec ") and "..." not in line and "…" not in line:
                commands.append((f"{name_of(page)}: {line}", line))
    return commands


# -- the pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found() -> None:
    page = ROOT / "README.md"
    assert broken_links(page, "[a](docs/none.md)") == ["docs/none.md"]
    assert broken_links(page, "# Some Title!\n[a](#some-title) [b](#other)") == ["#other"]
    assert broken_links(page, "[a](docs/architecture.md#layers)") == []
    assert broken_links(page, "[a](docs/architecture.md#no-such-part)") == [
        "docs/architecture.md#no-such-part"
    ]


@pytest.mark.parametrize(("name", "text"), python_blocks(), ids=[n for n, _ in python_blocks()])
def test_python_blocks_are_sound(name: str, text: str) -> None:
    """They compile, and what they import of ours exists."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    compile(text, name, "exec", flags=flags)
    for node in ast.walk(compile(text, name, "exec", flags=flags | ast.PyCF_ONLY_AST)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specdec_ext"):
            exec(compile(ast.Module([node], []), name, "exec"), {})


@pytest.mark.default_model
def test_the_readme_example_runs(default_model_path: Path, tmp_path: Path) -> None:
    (example,) = [text for name, text in python_blocks() if name.startswith("README.md")]
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    text, length = done.stdout.strip().rsplit("\n", 1)
    assert text
    assert float(length) >= 1.0


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_json_and_yaml_blocks_parse(page: Path) -> None:
    import yaml

    for language, block in fences(page.read_text()):
        if language == "json":
            json.loads(block)
        elif language == "yaml":
            yaml.safe_load(block)


@pytest.mark.parametrize(
    "line", [line for _, line in specdec_commands()], ids=[name for name, _ in specdec_commands()]
)
def test_specdec_commands_are_accepted(line: str) -> None:
    from specdec_ext.cli import _make_parser
    from specdec_ext.cli.common import normalize_argv

    words = shlex.split(line, comments=True)[1:]
    for sign in ("|", ">", "<", "2>", "&&", ";"):  # what the shell takes for itself
        if sign in words:
            words = words[: words.index(sign)]
    if words not in (["--help"], ["--version"]):
        assert _make_parser().parse_args(normalize_argv(words)).command == words[0]


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, re.MULTILINE))
    named = set().union(*(make_targets_named(page.read_text()) for page in PAGES))
    assert {"demo", "test"} <= named
    assert named <= targets
    described = set(re.findall(r"^([a-z][a-z-]*):.*## \S", makefile, re.MULTILINE))
    assert targets == described, "every target has its line in `make help`"


def test_first_lines_of_the_readme_are_the_two_commands() -> None:
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.strip()]
    assert lines[1].strip().startswith("make demo")
    assert lines[2].strip().startswith("make test")


# -- the whole tree -------------------------------------------------------------------------------

# Words are put together here, so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile(
    r"(?<![\w.-])/(?:"
    + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers"])
    + r")/[\w.]"
    r"|/tmp/" + "work" + r"|/op" + "t/(?:wheels|pypi)"
)
REGISTRIES = re.compile(
    "|".join(["pypi" + r"\.org", "python" + r"hosted\.org", "download" + r"\.pytorch\.org"])
)
OPEN_WORDS = ["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK", "for" + " now"]
OPEN_ENDS = re.compile(r"\b(?:" + "|".join(OPEN_WORDS) + r")\b")
URL = re.compile(r"https?://([\w.-]+)")


def faults(text: str) -> list[str]:
    """Machine paths, registry hosts, unknown hosts and open ends of one file."""
    found = [match.group(0) for match in MACHINE_PATHS.finditer(text)]
    found += [match.group(0) for match in REGISTRIES.finditer(text)]
    found += [match.group(0) for match in OPEN_ENDS.finditer(text)]
    found += [host for host in URL.findall(text) if host.rstrip(".") not in HOSTS]
    return found


def test_no_file_holds_machine_paths_unknown_hosts_or_open_ends() -> None:
    files = tracked()
    assert len(files) > 100
    results = ROOT / "benchmarks" / "results"  # prompts and texts of models: not ours to word
    found = {
        name_of(file): hits
        for file in files
        if not file.is_relative_to(results) and (hits := faults(file.read_text(errors="replace")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "see " + os.sep + "wo" + "rk/main/cpp",
        "path = '/ro" + "ot/.cache'",
        "--index-url https://" + "pypi" + ".org/simple",
        "http://" + "mirror.example.com/x",
        "# TO" + "DO: later",
        "good enough for" + " now",
    ],
)
def test_a_fault_is_found(text: str) -> None:
    assert faults(text)


def test_results_hold_no_machine_paths() -> None:
    results = [f for f in tracked() if f.is_relative_to(ROOT / "benchmarks" / "results")]
    found = {
        name_of(file): hits
        for file in results
        if (hits := MACHINE_PATHS.findall(file.read_text(errors="replace")))
    }
    assert found == {}


def test_files_end_with_one_newline_and_no_line_ends_in_blanks() -> None:
    found = []
    for file in tracked():
        text = file.read_text(errors="replace")
        if name_of(file) == "LICENSE" or not text:
            continue
        if not text.endswith("\n") or text.endswith("\n\n"):
            found.append(f"{name_of(file)}: end of file")
        if re.search(r"[ \t]+$", text, re.MULTILINE) or "\r" in text:
            found.append(f"{name_of(file)}: blanks at the end of a line")
    assert found == []
