"""Twenty edits of functions of the Python standard library, as they stand in this interpreter.

Seven functions get another name, seven a parameter more, and in six a word of a comment or
docstring is misspelt, to be corrected. Nothing is drawn: the same interpreter gives the same cases.

    python -m benchmarks.code_edit_cases [--show N]     a table of them; all of case N
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common

RENAMES = (
    ("textwrap.shorten", "clip"),
    ("fnmatch.filter", "select_names"),
    ("posixpath.commonpath", "shared_prefix"),
    ("string.capwords", "title_words"),
    ("colorsys.rgb_to_hls", "hls_of_rgb"),
    ("calendar.monthrange", "span_of_month"),
    ("heapq.heappushpop", "push_then_pop"),
)
PARAMETERS = (
    ("linecache.getline", "default=''"),
    ("posixpath.split", "strict=False"),
    ("statistics.median_low", "key=None"),
    ("bisect.bisect_left", "strict=False"),
    ("colorsys.hsv_to_rgb", "scale=1.0"),
    ("shutil.copyfileobj", "callback=None"),
    ("glob.escape", "extra=''"),
)
MISSPELT = (
    "textwrap.indent",
    "textwrap.fill",
    "inspect.cleandoc",
    "shutil.copytree",
    "linecache.updatecache",
    "bisect.insort_right",
)
_WORD = re.compile(r"[A-Za-z]{7,}")


@dataclass(frozen=True)
class CodeEdit:
    """kind    "rename", "parameter" or "typo"
    name    module and function
    task    what is asked for, without the code
    source  the code that is to be edited
    """

    kind: str
    name: str
    task: str
    source: str

    @property
    def message(self) -> str:
        """The task with the code."""
        return f"{self.task} Answer with the whole code only.\n\n```python\n{self.source}```"


def source_of(name: str) -> str:
    """The text of a function of a module's file, whatever replaces it at run time."""
    module, _, function = name.rpartition(".")
    text = Path(str(importlib.import_module(module).__file__)).read_text(encoding="utf-8")
    nodes = ast.parse(text).body
    [node] = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == function][:1]
    return "".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])


def misspell(source: str) -> tuple[str, str, str]:
    """The source with one word of its words for people misspelt: two letters change places. Also
    the word, right and wrong."""
    tree = ast.parse(source)
    told = ast.get_docstring(tree.body[0], clean=False)  # type: ignore[arg-type]
    if told is None:
        told = "\n".join(line for line in source.splitlines() if line.lstrip().startswith("#"))
    for match in _WORD.finditer(told):
        word = match.group()
        wrong = word[:3] + word[4] + word[3] + word[5:]
        if word.islower() and wrong != word and source.count(word) == 1:
            return source.replace(word, wrong), word, wrong
    raise SystemExit(f"{source.splitlines()[0]}: no word to misspell; choose another function")


def code_edits() -> list[CodeEdit]:
    """All cases."""
    cases = []
    for name, new in RENAMES:
        old = name.rpartition(".")[2]
        cases.append(CodeEdit("rename", name, f"Rename the function {old} to {new}.",
                              source_of(name)))  # fmt: skip
    for name, parameter in PARAMETERS:
        function = name.rpartition(".")[2]
        task = f"Add the parameter {parameter} as the last one of the function {function}."
        cases.append(CodeEdit("parameter", name, task, source_of(name)))
    for name in MISSPELT:
        source, word, wrong = misspell(source_of(name))
        task = f"Correct the misspelt word {wrong} to {word}."
        cases.append(CodeEdit("typo", name, task, source))
    return cases


def digest(cases: list[CodeEdit]) -> str:
    """A checksum of all texts: two files of results with the same one had the same cases."""
    return hashlib.sha256("\0".join(case.message for case in cases).encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", type=int, metavar="N", help="print the message of case N")
    args = parser.parse_args()
    cases = code_edits()
    if args.show is not None:
        print(cases[args.show].message)
        return 0
    rows = [[i, case.kind, case.name, len(case.source), case.task] for i, case in enumerate(cases)]
    print(common.markdown(["case", "kind", "function", "characters", "task"], rows))
    print(f"\nsha256 {digest(cases)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
