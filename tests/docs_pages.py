"""Reading the project's markdown pages: fenced blocks, indented commands, what is not run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("benchmarks/*.md")])

# The first line of a block that the tests cannot run; readers see it too.
NOT_RUN = re.compile(r"# not run in tests: \S.*")
SHELL = ("sh", "bash", "console", "shell")
# What a line of commands may begin with.
COMMANDS = (
    "specdec",
    "curl",
    "make",
    "pip",
    "python",
    ".venv/bin/python",
    "source",
    "cmake",
    "torchrun",
    "cp",
    "serve",
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def fences(text: str) -> Iterator[tuple[str, str]]:
    """(language, content) of the fenced blocks of a page."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield match.group(1), match.group(2)


def outside_fences(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def indented_lines(text: str) -> list[str]:
    """Lines of code blocks that are made by indentation, backslash continuations joined."""
    outside = outside_fences(text).replace("\\\n", " ")
    return [m.group(1) for m in re.finditer(r"^ {4}(\S.*)$", outside, re.MULTILINE)]


def code_lines(text: str) -> Iterator[str]:
    """Lines of fenced and indented code that are commands, backslash continuations joined."""
    for language, block in fences(text):
        if language in SHELL:
            yield from block.replace("\\\n", " ").splitlines()
    yield from indented_lines(text)


@dataclass(frozen=True)
class Block:
    """A fenced block of Python or of commands."""

    name: str  # page:number
    language: str  # "python" or "sh"
    text: str

    @property
    def runs(self) -> bool:
        return NOT_RUN.match(self.text) is None

    @property
    def expanded_commands(self) -> list[str]:
        """The commands with the block's own `export NAME=VALUE` lines filled in."""
        values: dict[str, str] = {}
        found = []
        for command in self.commands:
            for name in sorted(values, key=len, reverse=True):
                command = command.replace(f"${name}", values[name])
            if command.startswith("export "):
                name, _, value = command.removeprefix("export ").partition("=")
                values[name] = value.strip('"')
            else:
                found.append(command)
        return found

    @property
    def commands(self) -> list[str]:
        """The commands of a block, without comments on lines of their own."""
        lines = (line.strip() for line in self.text.replace("\\\n", " ").splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        wanted = SHELL if language == "sh" else (language,)
        texts = [body for name, body in fences(page.read_text()) if name in wanted]
        found += [Block(f"{name_of(page)}:{i}", language, text) for i, text in enumerate(texts)]
    return found
