"""Breaks the kernels in one place at a time and shows whether the tests notice.

    make mutate                              all mutants, writes tests/simt/mutation_report.md
    python tests/simt/mutate.py --list
    python tests/simt/mutate.py ampere-3 plan-1     only these, prints and writes nothing

A mutant is a file, a text that occurs in it once, and what stands there instead (mutants/*.py). It
is applied to a copy of the sources; the few objects of the emulated library that its suite names
are compiled again, linked with the rest of the library as it was built by `make emu`, and the
suite's tests run on it. A mutant is killed if they fail, hang or crash. One that survives has to be
declared harmless, with the reason; a surviving bug, or a harmless one that is killed, is a failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mutants import MUTANTS, SUITES, Mutant

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "emu" / "cmake"
LIBRARY = ROOT / "build" / "emu" / "libspecdec_emu.so"
REPORT = Path(__file__).with_name("mutation_report.md")
TEST_SECONDS = 240  # a suite takes a small part of it; past that a mutant hangs


class Stale(Exception):
    """A mutant does not fit the sources, or the sources do not build."""


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def places(mutant: Mutant) -> tuple[str, list[re.Match[str]]]:
    """The source and where the mutant's text stands in it, however lines are broken."""
    source = (ROOT / mutant.file).read_text()
    words = [re.escape(word) for word in mutant.old.split()]
    return source, list(re.finditer(r"\s+".join(words), source))


def apply(mutant: Mutant, tree: Path) -> None:
    source, found = places(mutant)
    if len(found) != 1:
        raise Stale(f"{mutant.name}: the text occurs {len(found)} times in {mutant.file}, not once")
    begin, end = found[0].span()
    (tree / mutant.file).write_text(source[:begin] + mutant.new + source[end:])


def commands() -> list[list[str]]:
    """The build of the checked library, command by command; the last one links."""
    done = run(["ninja", "-C", str(BUILD), "-t", "commands", LIBRARY.name])
    lines = [line.removeprefix(": && ").removesuffix(" && :") for line in done.stdout.splitlines()]
    steps = [shlex.split(line) for line in lines]
    return [step for step in steps if "-o" in step]


def output_of(step: list[str]) -> str:
    return step[step.index("-o") + 1]


def compile_in(scratch: Path, step: list[str], source: str | None, made: Path) -> None:
    """A step of the build with the sources of `scratch`, perhaps another source, to `made`."""
    moved = [arg.replace(f"{ROOT}/c", f"{scratch}/c") for arg in step]
    moved = [arg.replace(f"{ROOT}/tests", f"{scratch}/tests") for arg in moved]
    moved[moved.index("-o") + 1] = str(made)
    for flag in ("-MF", "-MT"):
        if flag in moved:
            moved[moved.index(flag) + 1] = str(made.with_suffix(".d"))
    if source is not None:
        moved[moved.index("-c") + 1] = source
    done = run(moved, cwd=BUILD)
    if done.returncode:
        raise Stale(f"does not compile:\n{done.stderr[-3000:]}")


def build(mutant: Mutant, scratch: Path) -> Path:
    """The library with the mutant in it."""
    suite = SUITES[mutant.suite]
    steps = commands()
    compiles = [step for step in steps if "-c" in step and "kernels_checked" in output_of(step)]
    link = list(next(step for step in steps if output_of(step).endswith(LIBRARY.name)))
    if suite.unit:
        # Stands before the objects that have the same kernels: the linker takes the first.
        source = scratch / "unit.cu"
        source.write_text(suite.unit)
        compile_in(scratch, compiles[0], str(source), scratch / "unit.o")
        link.insert(link.index("-o"), "-Wl,--allow-multiple-definition")
        link.insert(link.index("-o"), str(scratch / "unit.o"))
    for step in compiles:
        made = output_of(step)
        if any(re.search(pattern, made) for pattern in suite.objects):
            mine = scratch / (Path(made).name + ".o")
            compile_in(scratch, step, None, mine)
            link = [str(mine) if arg == made else arg for arg in link]
    library = scratch / LIBRARY.name
    link[link.index("-o") + 1] = str(library)
    done = run(link, cwd=BUILD)
    if done.returncode:
        raise Stale(f"does not link:\n{done.stderr[-3000:]}")
    (scratch / "libspecdec_emu_fast.so").symlink_to(library)  # tests of the fast one run on it too
    return library


def reason(output: str) -> str:
    """The line that tells most: what the emulator found, else what the test asserted."""
    found = re.search(
        r"(race: |out of bounds|before cp_async|undefined behaviour|uninitialised|misaligned|"
        r"deadlock|livelock|divergent|proxy)[^\n]*",
        output,
    )
    if found:
        return found.group(0)[:110]
    errors = [line[1:].strip() for line in output.splitlines() if line.startswith("E  ")]
    return errors[0][:110] if errors else "crash"


def run_tests(mutant: Mutant, library: Path) -> tuple[bool, str]:
    suite = SUITES[mutant.suite]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [str(ROOT / "tests/kernels" / name) for name in suite.files]
    command += ["-k", mutant.tests or suite.tests]
    environment = {**os.environ, "SPECDEC_EMU_FOLDER": str(library.parent)}
    try:
        done = run(command, cwd=ROOT, env=environment, timeout=TEST_SECONDS)
    except subprocess.TimeoutExpired:
        return True, f"no end within {TEST_SECONDS} s"
    if done.returncode == 0:
        return False, ""
    if done.returncode in (2, 4, 5):  # interrupted, usage, nothing collected
        raise Stale(f"pytest says\n{done.stdout[-2000:]}{done.stderr[-500:]}")
    return True, reason(done.stdout + done.stderr)


def examine(mutant: Mutant, scratch: Path) -> tuple[bool, str, float]:
    begin = time.monotonic()
    shutil.rmtree(scratch, ignore_errors=True)
    for folder in ("cpp", "cuda", "tests/simt"):
        shutil.copytree(ROOT / folder, scratch / folder)
    apply(mutant, scratch)
    killed, why = run_tests(mutant, build(mutant, scratch))
    return killed, why, time.monotonic() - begin


def write_report(rows: list[tuple[Mutant, bool, str]]) -> None:
    bugs = [killed for mutant, killed, _ in rows if not mutant.harmless]
    lines = [
        "# Mutation report",
        "",
        "Written by `make mutate` (tests/simt/mutate.py). Each line is one change to the kernels,",
        "alone, and what the tests said on the checked emulator.",
        "",
        f"**{sum(bugs)} of {len(bugs)} bugs killed** ({sum(bugs) / max(1, len(bugs)):.0%}); "
        f"{len(rows) - len(bugs)} harmless changes.",
        "",
        "| mutant | change | result | by |",
        "|---|---|---|---|",
    ]
    for mutant, killed, why in rows:
        result = "killed" if killed else "harmless" if mutant.harmless else "**survived**"
        by = (why if killed else mutant.harmless).replace("|", "\\|")
        lines.append(f"| {mutant.name} | {mutant.bug} | {result} | {by} |")
    REPORT.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation tests of the emulated kernels.")
    parser.add_argument("names", nargs="*", help="mutants or suites; none: all, and the report")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check", action="store_true", help="only that every mutant fits")
    arguments = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if not arguments.names or {mutant.name, mutant.suite} & set(arguments.names)
    ]
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.name:14} {mutant.file:36} {mutant.bug}")
        return 0
    unfit = [(mutant.name, len(places(mutant)[1])) for mutant in chosen]
    unfit = [(name, count) for name, count in unfit if count != 1]
    for name, count in unfit:
        print(f"{name}: its text occurs {count} times, not once")
    if arguments.check or unfit:
        return 1 if unfit else 0
    rows, wrong = [], 0
    for mutant in chosen:
        try:
            killed, why, seconds = examine(mutant, ROOT / "build" / "emu" / "mutant")
        except Stale as error:
            print(f"{mutant.name}: {error}", flush=True)
            wrong += 1
            continue
        rows.append((mutant, killed, why))
        wrong += killed == bool(mutant.harmless)
        result = "killed" if killed else "harmless" if mutant.harmless else "SURVIVED"
        print(f"{mutant.name:14} {result:9} {seconds:5.1f} s  {mutant.bug}: {why}", flush=True)
    if not arguments.names:
        write_report(rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
