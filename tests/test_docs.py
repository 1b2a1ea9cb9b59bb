"""The documents: links resolve, data parses; the tree: no leaks, no loose ends, no clocks."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from docs_pages import PAGES, ROOT, code_lines, fences, name_of, outside_fences

TEXT_SUFFIXES = {
    *(".cc", ".cfg", ".clang-format", ".cmake", ".cu", ".cuh", ".editorconfig", ".gitignore"),
    *(".h", ".json", ".jsonl", ".md", ".py", ".pyi", ".sh", ".toml", ".txt", ".yaml", ".yml", ""),
}
# Where links may lead. Package registries and mirrors are the installer's configuration, not ours.
# www.w3.org names the XML namespace of SVG; 127.0.0.1 is where a server of one's own is.
HOSTS = {
    "127.0.0.1", "arxiv.org", "dmlc.github.io", "github.com", "huggingface.co", "www.apache.org",
    "www.w3.org",
}  # fmt: skip


def tracked() -> list[Path]:
    """Text files of the repository, those about to be added included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [ROOT / line for line in listing.splitlines()]
    return [f for f in files if f.is_file() and f.suffix in TEXT_SUFFIXES]


# -- reading a page -------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Fragment names of a page's headings, as GitHub makes them."""
    found = set()
    for title in re.findall(r"^#+ (.+)$", outside_fences(text), re.MULTILINE):
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_json_and_yaml_blocks_parse(page: Path) -> None:
    import yaml

    for language, block in fences(page.read_text()):
        if language == "json":
            json.loads(block)
        elif language == "yaml":
            yaml.safe_load(block)


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


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_the_tables_of_results_are_those_of_the_newest_files(page: str) -> None:
    from benchmarks import report

    text = (ROOT / page).read_text()
    between = text.partition(report.BEGIN)[2].partition(report.END)[0].strip()
    assert between == report.report(page), "run `python -m benchmarks.report --write`"


# -- the walk through the engine ------------------------------------------------------------------

HOP = re.compile(r"`([\w/.]+\.(?:py|cc|h)):([\w:.]+)`")
MAX_HOPS = 25


def hops(text: str) -> list[tuple[str, str]]:
    """(file, function) of all that the table of hops names."""
    rows = re.findall(r"^\| \d+ \| ([^|]+) \|", text, re.MULTILINE)
    return [hop for row in rows for hop in HOP.findall(row)]


def is_defined(file: str, name: str) -> bool:
    """Whether `file` defines the function, method or class; Python files are the package's."""
    path = ROOT / file if file.startswith("cpp/") else ROOT / "python" / "specdec_ext" / file
    if not path.is_file():
        return False
    text = path.read_text()
    if path.suffix != ".py":
        return re.search(rf"^[^\s/].*\b{re.escape(name)}\(", text, re.MULTILINE) is not None
    found: Any = ast.parse(text)
    for part in name.split("."):
        nodes = [n for n in found.body if getattr(n, "name", None) == part]
        if not nodes:
            return False
        found = nodes[0]
    return True


def test_every_hop_of_the_architecture_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    numbers = [int(n) for n in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 15 <= len(numbers) <= MAX_HOPS
    named = hops(text)
    assert len({file for file, _ in named}) > 8
    assert [hop for hop in named if not is_defined(*hop)] == []
    assert [hop for hop in HOP.findall(text) if not is_defined(*hop)] == []


def test_a_hop_that_is_gone_is_found() -> None:
    assert hops("| 1 | `llm.py:LLM.generate` | x |\n| y | `a.py:b` |") == [
        ("llm.py", "LLM.generate")
    ]
    assert is_defined("llm.py", "LLM.generate")
    assert not is_defined("llm.py", "LLM.generated")
    assert not is_defined("llm.py", "generate")
    assert is_defined("cpp/engine/plan.cc", "Executor::plan")
    assert not is_defined("cpp/engine/plan.cc", "Executor::planned")
    assert not is_defined("cpp/engine/plans.cc", "Executor::plan")


def test_pages_that_the_sources_name_exist() -> None:
    named = {
        (name_of(file), page)
        for file in tracked()
        if file.suffix in (".py", ".h", ".cc", ".cu", ".cuh") and "docs/" in file.read_text()
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", file.read_text())
    }
    assert len(named) > 10
    missing = {(file, page) for file, page in named if not (ROOT / page).is_file()}
    assert {(file, page) for file, page in missing if file != "tests/test_docs.py"} == set()


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


# "Of ..." at the start leaves the reader to guess of what; "beside" is a place, "besides" is more.
STUMBLES = re.compile(r'""" ?Of |^ *(?://|#) Of [a-z]|[Bb]eside (?:that|this|these),', re.MULTILINE)


def test_no_text_begins_with_of() -> None:
    texts = {name_of(file): file.read_text(errors="replace") for file in tracked()}
    del texts["tests/test_docs.py"]
    assert [name for name, text in texts.items() if STUMBLES.search(text)] == []
    for fault in ('"""Of one row."""', "  // Of a step.", "# Of beams.", "beside that,"):
        assert STUMBLES.search(fault), fault


# Tests that read a clock all the same: times within one run that hold whatever the load is, a
# clock that the test sets itself, ends of a run that its parts are far from, and a run that lasts
# as long as it is told.
CLOCK_READERS = {
    "tests/engine/test_step_times.py",
    "tests/serve/test_serve_soak.py",
    "tests/unit/test_benchmark_parts.py",  # sets a clock of its own
    "tests/unit/test_gpu_runner.py",
    "tests/unit/test_step_cost_growth.py",
}
CLOCKS = re.compile(r"\b(?:perf_counter|monotonic|time\.time)\b|\btimeout(?:_s)?=\d")


def test_no_test_asserts_wall_clock_time() -> None:
    """Nor ends a child after so many seconds: both fail on a busy machine."""
    readers = {
        name_of(file)
        for file in tracked()
        if file.is_relative_to(ROOT / "tests") and file.suffix == ".py"
        if CLOCKS.search(file.read_text())
    }
    assert readers - {name_of(Path(__file__))} == CLOCK_READERS
