"""Breaks the kernels in one place at a time and shows whether the tests notice.

    make mutate                              all mutants, writes tests/simt/mutation_report.md
    python tests/simt/mutate.py --list
    python tests/simt/mutate.py --jobs 2 ampere plan-1     only a suite and a mutant, no report

A mutant is a file, a text that occurs in it once, and what stands there instead (mutants/*.py). It
is applied to a copy of the sources; the few objects of the emulated library that its suite names
are compiled again, linked with the rest of the library as it was built by `make emu`, and the
suite's tests run on it. A mutant is killed if they fail, hang or crash. One that survives has to be
declared harmless, or a bug that cannot be seen, with the reason; anything else that survives, and
a declared one that is killed, is a failure.

Results are kept in build/emu/mutation.json, so that an interrupted run goes on where it was. A
result counts as long as the mutant and every file of cpp/ and cuda/ that its objects were compiled
from are as they were, and of the suite's tests the file whose test failed, or all if none did.
--fresh forgets all results, which a change of the emulator asks for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from mutants import MUTANTS, SUITES, Mutant

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "emu" / "cmake"
LIBRARY = ROOT / "build" / "emu" / "libspecdec_emu.so"
REPORT = Path(__file__).with_name("mutation_report.md")
RESULTS = ROOT / "build" / "emu" / "mutation.json"
LISTS = ("cuda/attention/instances/launchers.h", "cpp/backend/attention/instances.h")  # of names
TEST_SECONDS = 240  # of the CPU; a suite takes a small part of it; past that a mutant hangs

Result = dict[str, Any]  # killed, why, seconds, files: what it rests on, each with its digest


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


def tests_in_fork(arguments: list[str], library: Path, log: Path) -> int:
    """pytest in a child that has imported torch already; its exit status, negative: the signal."""
    child = os.fork()
    if child == 0:
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (TEST_SECONDS, TEST_SECONDS))
            os.environ["SPECDEC_EMU_FOLDER"] = str(library.parent)
            os.chdir(ROOT)
            import pytest

            status = int(pytest.main(arguments))
            sys.stdout.flush()
            os._exit(status)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_tests(mutant: Mutant, library: Path) -> tuple[bool, str, tuple[str, ...]]:
    """Whether the tests noticed, how, and the test files that say so."""
    suite = SUITES[mutant.suite]
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow"]
    arguments += [str(ROOT / "tests/kernels" / name) for name in suite.files]
    arguments += ["-k", mutant.tests or suite.tests]
    log = library.with_suffix(".log")
    status = tests_in_fork(arguments, library, log)
    output = log.read_text(errors="replace")
    if status == 0:
        return False, "", suite.files
    if status in (-9, -24):
        return True, f"no end within {TEST_SECONDS} s", suite.files
    if status in (2, 4, 5, 99):  # interrupted, usage, nothing collected
        raise Stale(f"pytest says\n{output[-2500:]}")
    if "ImportError" in output or "ModuleNotFoundError" in output:
        raise Stale(f"the tests do not run: {reason(output)}")
    failed = re.search(r"^FAILED tests/kernels/(\w+\.py)", output, re.MULTILINE)
    return True, reason(output), (failed[1],) if failed else suite.files


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


def read_files(scratch: Path) -> list[Path]:
    """The project's files that the objects in `scratch` were compiled from."""
    found = set()
    for listing in scratch.glob("*.d"):
        for word in listing.read_text().replace("\\\n", " ").split():
            path = Path(word.removesuffix(":"))
            if path.is_relative_to(scratch) and path.suffix not in (".o", ".d"):
                path = ROOT / path.relative_to(scratch)
            if any(path.is_relative_to(ROOT / folder) for folder in ("cpp", "cuda")):
                found.add(path)
    found -= {ROOT / path for path in LISTS}
    return sorted(found)


def identity(mutant: Mutant, killed: bool) -> str:
    suite = SUITES[mutant.suite]
    text = repr(
        (mutant, suite.objects, suite.unit, *([] if killed else [suite.tests, suite.files]))
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def still_true(mutant: Mutant, result: Result) -> bool:
    same = all(digest(ROOT / path) == was for path, was in result["files"].items())
    return same and result["identity"] == identity(mutant, result["killed"])


def examine(mutant: Mutant) -> Result:
    """Builds and tests one mutant, in a folder of this process."""
    spent = sum(os.times()[:4])
    scratch = ROOT / "build" / "emu" / f"mutant-{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        for folder in ("cpp", "cuda", "tests/simt"):
            shutil.copytree(ROOT / folder, scratch / folder)
        apply(mutant, scratch)
        library = build(mutant, scratch)
        files = read_files(scratch)
        killed, why, tests = run_tests(mutant, library)
        files += [ROOT / "tests/kernels" / name for name in tests]
    except Stale as error:
        return {"error": str(error)}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return {
        "killed": killed,
        "why": why,
        "seconds": round(sum(os.times()[:4]) - spent, 1),
        "identity": identity(mutant, killed),
        "files": {str(path.relative_to(ROOT)): digest(path) for path in files},
    }


def remembered(fresh: bool) -> dict[str, Result]:
    if fresh or not RESULTS.exists():
        return {}
    kept: dict[str, Result] = json.loads(RESULTS.read_text())
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    return {n: r for n, r in kept.items() if n in by_name and still_true(by_name[n], r)}


def examine_all(chosen: list[Mutant], jobs: int, fresh: bool) -> dict[str, Result]:
    """A result for each mutant that fits; prints and keeps them as they come."""
    results = remembered(fresh)
    left = [mutant for mutant in chosen if mutant.name not in results]
    print(f"{len(chosen) - len(left)} of {len(chosen)} are known", flush=True)
    import torch  # noqa: F401  (once: the tests run in forks of this process)

    import specdec_ext  # noqa: F401

    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        running = {pool.submit(examine, mutant): mutant for mutant in left}
        for future in as_completed(running):
            mutant, result = running[future], future.result()
            if "error" in result:
                print(f"{mutant.name}: {result['error']}", flush=True)
                continue
            results[mutant.name] = result
            said = "killed" if result["killed"] else "harmless" if mutant.harmless else "SURVIVED"
            print(
                f"{mutant.name:14} {said:9} {result['seconds']:5.1f} s  "
                f"{mutant.bug}: {result['why']}",
                flush=True,
            )
            partial = RESULTS.with_suffix(".part")
            partial.write_text(json.dumps(results, indent=0))
            partial.replace(RESULTS)
    return results


def write_report(rows: list[tuple[Mutant, bool, str]], missing: list[Mutant]) -> None:
    bugs = [killed for mutant, killed, _ in rows if not mutant.harmless]
    lines = [
        "# Mutation report",
        "",
        "Written by `make mutate` (tests/simt/mutate.py). Each line is one change to the kernels,",
        "alone, and what the tests said on the checked emulator.",
        "",
        f"**{sum(bugs)} of {len(bugs)} bugs killed** ({sum(bugs) / max(1, len(bugs)):.1%}); "
        f"{len(rows) - len(bugs)} harmless changes, each with its reason.",
        "",
    ]
    if missing:
        lines += [f"Not examined: {', '.join(mutant.name for mutant in missing)}.", ""]
    quiet = [(mutant, killed, why) for mutant, killed, why in rows if not killed]
    loud = [(mutant, killed, why) for mutant, killed, why in rows if killed]
    for title, part in (("Not noticed", quiet), ("Killed", loud)):
        lines += [
            f"## {title}",
            "",
            "| mutant | change | result | by, or why not |",
            "|---|---|---|---|",
        ]
        for mutant, killed, why in part:
            result = "killed" if killed else "harmless" if mutant.harmless else "**survived**"
            by = (
                re.sub(r"\S*/mutant-\d+/", "", why) if killed else mutant.harmless or mutant.unseen
            ).replace("|", "\\|")
            lines.append(f"| {mutant.name} | {mutant.bug} | {result} | {by} |")
        lines.append("")
    REPORT.write_text("\n".join(lines).rstrip() + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation tests of the emulated kernels.")
    parser.add_argument("names", nargs="*", help="mutants or suites; none: all, and the report")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--report", action="store_true", help="of the known results; runs nothing")
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
    if arguments.report:
        results = remembered(fresh=False)
    else:
        results = examine_all(chosen, arguments.jobs, arguments.fresh)
    rows = [
        (m, results[m.name]["killed"], results[m.name]["why"]) for m in chosen if m.name in results
    ]
    if not arguments.names:
        write_report(rows, [mutant for mutant in chosen if mutant.name not in results])
    wrong = [
        mutant.name
        for mutant, killed, _ in rows
        if killed == bool(mutant.harmless or mutant.unseen)
    ]
    print(f"{len(rows)} of {len(chosen)} examined; not as declared: {', '.join(wrong) or 'none'}")
    return 1 if wrong or len(rows) < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
