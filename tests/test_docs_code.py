"""Every block of code and every command of the documents runs, and so do the examples.

A block whose first line is `# not run in tests: REASON` is checked for syntax alone. Blocks run in
a folder in which `examples`, `python` and `benchmarks` are those of the repository, so a command
that works here works at the root of a checkout. The quick ones run in `make test`.
"""

from __future__ import annotations

import ast
import contextlib
import glob
import logging
import os
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs_pages import COMMANDS, PAGES, ROOT, Block, blocks, code_lines, indented_lines, name_of
from specdec_ext.cli import main
from specdec_ext.errors import SyntheticAcceptanceWarning

SHOWN_BUT_NOT_LINKED = {".git", ".venv", "build", ".data"}

# Commands that take minutes, and what makes a test of minutes of those that take an hour.
SLOW = ("specdec bench", "specdec tune", "specdec tree --measure", "specdec train-", "benchmarks.")
SHORTER = {
    "specdec generate": ["--max-output-len", "16"],
    "specdec train-": ["--num-prompts", "24", "--max-new-tokens", "24", "--steps", "4",
                       "--measure-prompts", "1", "--measure-tokens", "8"],
    "specdec tune": ["--max_seconds", "20"],
    "specdec bench sweep": ["--output_len", "16"],
}  # fmt: skip
# Commands that are not run here because something else runs them.
ELSEWHERE = {
    "make": "test_make_targets_exist; make test is what runs this file, CI runs it and cuda-check",
    "pip install .": "tests/test_packaging.py builds and installs the wheel",
    "source .venv/bin/activate": "this environment",
}


def run_elsewhere(command: str) -> bool:
    return any(command == name or command.startswith(name + " ") for name in ELSEWHERE)


def is_slow(block: Block) -> bool:
    return any(name in command for command in block.commands for name in SLOW)


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def marked(found: list[Block]) -> list[Any]:
    return [
        pytest.param(block, id=block.name, marks=[pytest.mark.slow] if is_slow(block) else [])
        for block in found
    ]


PYTHON, COMMAND = blocks("python"), blocks("sh")
RUN_COMMANDS = [
    block for block in COMMAND if block.runs and not all(map(run_elsewhere, block.commands))
]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that looks like the root of a checkout, and that a command may write to."""
    for part in ROOT.iterdir():
        if part.name not in SHOWN_BUT_NOT_LINKED:
            (tmp_path / part.name).symlink_to(part)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    logger = logging.getLogger("specdec_ext")
    before = list(logger.handlers), logger.level, logger.propagate
    yield tmp_path
    logger.handlers[:], logger.level, logger.propagate = before


def run_command(command: str) -> None:
    words = words_of(command)
    for start, more in SHORTER.items():
        if command.startswith(start):
            words += more
    if words[0] == "specdec":
        words = [w for word in words for w in (sorted(glob.glob(word)) if "*" in word else [word])]
        assert main(words[1:]) == 0, command
        return
    environment = dict(os.environ)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    assert words[0] in ("python", ".venv/bin/python"), command
    done = subprocess.run(
        [sys.executable, *words[1:]], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def synthetic_acceptance_may_warn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntheticAcceptanceWarning)
        yield


# -- what runs ------------------------------------------------------------------------------------


@pytest.mark.default_model
@pytest.mark.parametrize("block", marked([block for block in PYTHON if block.runs]))
def test_a_python_block_runs(
    block: Block, checkout: Path, default_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with synthetic_acceptance_may_warn():
        exec(compile(block.text, block.name, "exec"), {"__name__": "__main__"})
    assert "print(" not in block.text or capsys.readouterr().out.strip()


@pytest.mark.default_model
@pytest.mark.parametrize("block", marked(RUN_COMMANDS))
def test_commands_run(
    block: Block, checkout: Path, default_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order: a later one may read what an earlier one has written."""
    for command in block.commands:
        if run_elsewhere(command):
            continue
        run_command(command)
        if words_of(command)[0] == "specdec":
            assert capsys.readouterr().out.strip(), f"{command}: printed nothing"


@pytest.mark.default_model
@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=name_of)
def test_an_example_runs(
    script: Path,
    checkout: Path,
    default_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    assert out.strip()
    assert "identical: no" not in out


@pytest.mark.default_model
def test_a_newcomer_who_gets_no_text_is_told_about_chat_templates(
    default_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default model ends at once when an instruction is not in its template."""
    command = ["generate", "--input_text", "Write a haiku about rivers.", "--max_output_len", "4"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.out.strip() == ""
    assert "--chat applies its chat template" in said.err
    assert main([*command, "--chat"]) == 0
    said = capsys.readouterr()
    assert said.out.strip() != ""
    assert "hint" not in said.err


# -- what is only read ----------------------------------------------------------------------------


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_a_python_block_compiles_and_its_imports_exist(block: Block) -> None:
    tree = ast.parse(block.text, block.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specdec_ext"):
            exec(compile(ast.Module([node], []), block.name, "exec"), {})


@pytest.mark.parametrize("block", COMMAND, ids=lambda block: block.name)
def test_commands_are_sound(block: Block) -> None:
    """The shell can read them, and the command line knows every option of `specdec`."""
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in block.expanded_commands:
        assert_known(command)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_command_or_code_is_hidden_from_these_tests(page: Path) -> None:
    """Indented blocks are formulas and pictures; the README's first two lines are `make`."""
    hidden = [
        line
        for line in indented_lines(page.read_text())
        if line.split()[0] in COMMANDS or "specdec_ext import" in line
        if not run_elsewhere(line.partition(" #")[0].strip())
    ]
    assert hidden == []
    assert all(line.strip() for line in code_lines(page.read_text()) if line.startswith("specdec"))


def assert_known(command: str) -> None:
    from specdec_ext.cli import _make_parser
    from specdec_ext.cli.common import normalize_argv

    words = words_of(command)
    while "=" in words[0]:
        words.pop(0)
    if words[0] == "specdec":
        if words[1:] not in (["--help"], ["--version"]):
            assert _make_parser().parse_args(normalize_argv(words[1:])).command == words[1]
    elif words[0].startswith("build/"):
        return  # what a command in front of it has built
    elif "/" in words[0] and words[0] != ".venv/bin/python":
        assert os.access(ROOT / words[0], os.X_OK), words[0]
    else:
        assert words[0] in COMMANDS, f"unknown command {words[0]!r}: add it to COMMANDS"
    if words[0] in ("python", ".venv/bin/python") and words[1] == "-m":
        path = ROOT / words[2].replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), words[2]


def test_a_mistake_in_a_page_is_found(checkout: Path) -> None:
    with pytest.raises(AssertionError):
        run_command("specdec generate --input_file examples/no_such_file.txt")
    with pytest.raises(SystemExit):
        assert_known("specdec generate --no-such-option 3")
    with pytest.raises(AssertionError):
        assert_known("python -m benchmarks.no_such_benchmark")
    with pytest.raises(AssertionError):
        assert_known("scripts/no_such_script.sh")
    exports = Block("p:0", "sh", 'export A=1\nexport AB="--x=$A y"\nmake $AB $A\n')
    assert exports.expanded_commands == ["make --x=1 y 1"]
    assert not Block("p:0", "sh", "# not run in tests: needs a GPU\nmake demo\n").runs
    assert Block("p:0", "sh", "# not run in tests:\nmake demo\n").runs, "a reason is needed"
