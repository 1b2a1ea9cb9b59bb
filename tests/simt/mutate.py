"""Breaks the kernels in one place at a time and shows whether the tests notice.

    make mutate                              all mutants, writes tests/simt/mutation_report.md
    python tests/simt/mutate.py --list
    python tests/simt/mutate.py --jobs 2 ampere plan-1     only a suite and a mutant, no report

A mutant is a file, a text that occurs in it once, and what stands there instead (mutants/*.py). It
is applied to a copy of the sources; those objects of the emulated library that its suite names and
that are compiled from the file are compiled again, linked with the rest as `make emu` built it
(mutate_build.py), and the suite's tests run on it (mutate_tests.py), first those that noticed other
mutants of the file. A mutant is killed if they fail, hang or crash. One that survives all of them
has to be declared harmless, or a bug that cannot be seen, with the reason; anything else that
survives, and a declared one that is killed, is a failure. A test that notices has to pass on the
same objects without the mutant.

Results are kept in mutation_results.json beside this file, so that an interrupted run goes on where
it was, on any machine. A result counts as long as the mutant and every file of cpp/ and cuda/ that
its objects were compiled from are as they were, and of the suite's tests the file whose test
failed, or all if none did. --fresh forgets all results, which a change of the emulator asks for.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import multiprocessing
import multiprocessing.util
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from mutants import MUTANTS, SUITES, Mutant
from mutate_build import LIBRARY, ROOT, Stale, Workshop, digest, places
from mutate_tests import Server

REPORT = Path(__file__).with_name("mutation_report.md")
RESULTS = Path(__file__).with_name("mutation_results.json")
PASSED = ROOT / "build" / "emu" / "passed.json"  # by this machine's library
TEST_SECONDS = 240  # of the CPU; a suite takes a part of it, half at most; past that a mutant hangs

# killed, why, test, seconds, identity; files: what it rests on; digest: of all of them
Result = dict[str, Any]
# By suite, the tests that pass without a mutant, and what that rests on.
Passed = dict[str, dict[str, list[str]]]
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


def asked(mutant: Mutant) -> tuple[tuple[str, ...], str]:
    """The test files and what is chosen of them."""
    suite = SUITES[mutant.suite]
    return suite.files, mutant.tests or suite.tests


class Bench:
    """What a process examines its mutants with, and what it knows of the tests."""

    def __init__(self, passed: Passed, noticed: dict[str, str]) -> None:
        self.workshop = Workshop(ROOT / "build" / "emu" / f"mutant-{os.getpid()}")
        self.library = digest(LIBRARY)
        self.whole, self.whole_of = self.workshop.scratch / "whole.so", ""  # without a mutant
        self.passed = passed
        self.noticed = noticed  # by mutant, the test that killed it, now or some time ago
        self.seconds: dict[str, float] = {}  # of the CPU, of the tests that ran
        self.server: Server | None = None
        self.serves = ""

    def ready(self, mutant: Mutant) -> Server:
        """The tests that the mutant needs, collected while there is no library."""
        if self.server is None or self.serves != repr(asked(mutant)):
            if self.server is not None:
                self.server.close()
            self.server = None
            self.workshop.empty()
            self.server = Server(*asked(mutant), self.workshop.made)
            self.serves = repr(asked(mutant))
        return self.server

    def in_order(self, mutant: Mutant, tests: list[str]) -> list[str]:
        """The tests by how likely a second of theirs notices the mutant."""
        kills: Counter[str] = Counter()
        for name, test in self.noticed.items():
            kills[test] += 4 if BY_NAME[name].file == mutant.file else 1
        own = self.noticed.get(mutant.name)

        def rank(test: str) -> tuple[bool, float]:
            return test != own, -(kills[test] + 0.5) / (self.seconds.get(test, 0.5) + 0.02)

        return sorted(tests, key=rank)

    def passes_whole(self, mutant: Mutant, server: Server, test: str) -> bool:
        """Whether the test passes without a mutant, on objects compiled in the same way."""
        rests = [self.library, digest(ROOT / test.split("::")[0])]
        known = self.passed.setdefault(mutant.suite, {})
        if known.get(test) != rests:
            if self.whole_of != mutant.suite:
                self.workshop.build_whole(SUITES[mutant.suite]).rename(self.whole)
                self.whole_of = mutant.suite
            self.workshop.place(self.whole)
            if server.run([test], TEST_SECONDS).killed:
                return False
            known[test] = rests
        return True

    def examine(self, mutant: Mutant) -> Result:
        """Builds and tests one mutant."""
        server = self.ready(mutant)
        spent = sum(os.times()[:4])
        self.workshop.build(mutant)
        files = self.workshop.read_files()
        verdict = server.run(self.in_order(mutant, server.tests), TEST_SECONDS)
        spent = sum(os.times()[:4]) - spent + verdict.seconds
        self.seconds.update(verdict.tests)
        if verdict.killed:
            self.noticed[mutant.name] = verdict.test
            if not self.passes_whole(mutant, server, verdict.test):
                raise Stale(f"{verdict.test} fails without a mutant too")
        tests = [Path(verdict.test.split("::")[0]).name] if verdict.killed else asked(mutant)[0]
        files += [ROOT / "tests/kernels" / name for name in tests]
        return {
            "killed": verdict.killed,
            "why": re.sub(r"\S*/mutant-\d+/", "", verdict.why),
            "test": verdict.test,
            "seconds": round(spent, 1),
            "identity": identity(mutant, verdict.killed),
            "files": [str(path.relative_to(ROOT)) for path in files],
            "digest": digest_of(str(path.relative_to(ROOT)) for path in files),
        }

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        shutil.rmtree(self.workshop.scratch, ignore_errors=True)


bench: Bench  # of a process that examines


def open_bench(passed: Passed, noticed: dict[str, str]) -> None:
    global bench
    bench = Bench(passed, noticed)
    multiprocessing.util.Finalize(bench, bench.close, exitpriority=10)


def examine(mutant: Mutant) -> tuple[Result, Passed]:
    """The mutant's result, and the tests known by now to pass without one."""
    try:
        return bench.examine(mutant), bench.passed
    except Stale as error:
        return {"error": str(error)}, bench.passed


def identity(mutant: Mutant, killed: bool) -> str:
    suite = SUITES[mutant.suite]
    same = dataclasses.replace(mutant, harmless="")  # what is declared changes no result
    text = repr((same, suite.objects, suite.unit, *([] if killed else [suite.tests, suite.files])))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_of(files: Iterable[str]) -> str:
    text = repr([(path, digest(ROOT / path)) for path in files])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def still_true(mutant: Mutant, result: Result) -> bool:
    same = result["identity"] == identity(mutant, result["killed"])
    return same and result["digest"] == digest_of(result["files"])


def remembered() -> dict[str, Result]:
    """The last results of the mutants that there are."""
    if not RESULTS.exists():
        return {}
    kept = json.loads(RESULTS.read_text())
    return {
        name: {**result, "files": kept["files"][result["files"]]}
        for name, result in kept["mutants"].items()
        if name in BY_NAME
    }


def remember(results: dict[str, Result]) -> None:
    """Writes them, a line for each; lists of files are written once."""
    lists = sorted({tuple(result["files"]) for result in results.values()})
    number = {files: i for i, files in enumerate(lists)}
    rows = [
        f"{json.dumps(name)}: {json.dumps({**result, 'files': number[tuple(result['files'])]})}"
        for name in BY_NAME
        if (result := results.get(name)) is not None
    ]
    files, mutants = (",\n".join(each) for each in (map(json.dumps, lists), rows))
    write(RESULTS, f'{{"files": [\n{files}],\n"mutants": {{\n{mutants}}}}}\n')


def write(path: Path, text: str) -> None:
    """The file is whole or as it was."""
    partial = path.with_suffix(".part")
    partial.write_text(text)
    partial.replace(path)


def examine_all(chosen: list[Mutant], jobs: int, fresh: bool) -> dict[str, Result]:
    """A result for each mutant that fits; prints and keeps them as they come."""
    old = remembered()
    passed: Passed = json.loads(PASSED.read_text()) if PASSED.exists() else {}
    noticed = {name: result["test"] for name, result in old.items() if result["killed"]}
    results = {} if fresh else {n: r for n, r in old.items() if still_true(BY_NAME[n], r)}
    left = [mutant for mutant in chosen if mutant.name not in results]
    print(f"{len(chosen) - len(left)} of {len(chosen)} are known", flush=True)
    import torch  # noqa: F401  (once: the tests run in forks of this process)

    import specdec_ext  # noqa: F401

    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, context, open_bench, (passed, noticed)) as pool:
        running = {pool.submit(examine, mutant): mutant for mutant in left}
        for future in as_completed(running):
            mutant = running[future]
            result, known = future.result()
            for suite, tests in known.items():
                passed.setdefault(suite, {}).update(tests)
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
            remember(old | results)
            write(PASSED, json.dumps(passed))
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
            by = (why if killed else mutant.harmless or mutant.unseen).replace("|", "\\|")
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
        results = {n: r for n, r in remembered().items() if still_true(BY_NAME[n], r)}
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
