"""A suite's tests, collected once and run on many libraries.

A server is a process that has imported and collected the tests while there is no library. For
each library it forks, and the child loads the library and runs the tests, so that none pays for
starting Python again and none sees what another left behind.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mutate_build import ROOT, Stale

STARTED = "started"  # beside the library: a line for each test, when it began in the CPU's time


@dataclasses.dataclass(frozen=True)
class Verdict:
    killed: bool
    why: str
    test: str  # that noticed
    seconds: float  # of the CPU
    tests: dict[str, float]  # that ran, and the seconds of each


class _Forks:
    """Answers each order that comes in by a forked run of the session's tests."""

    def __init__(self, orders: int, answers: int) -> None:
        self.orders, self.answers = os.fdopen(orders), os.fdopen(answers, "w")
        self.started: Any = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        tests = [item.nodeid for item in session.items]
        print(json.dumps(tests), file=self.answers, flush=True)
        for line in self.orders:
            order = json.loads(line)
            child = os.fork()
            if child == 0:
                self._begin(session, order)
                return  # to pytest's own loop
            _, status, used = os.wait4(child, 0)
            seconds = used.ru_utime + used.ru_stime
            print(os.waitstatus_to_exitcode(status), seconds, file=self.answers, flush=True)
        os._exit(0)

    def _begin(self, session: pytest.Session, order: dict[str, Any]) -> None:
        folder = Path(order["folder"])
        out = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (order["limit"], order["limit"]))
        self.started = (folder / STARTED).open("w", buffering=1)
        place = {name: i for i, name in enumerate(order["tests"])}
        session.items[:] = [item for item in session.items if item.nodeid in place]
        session.items.sort(key=lambda item: place[item.nodeid])
        from emulators import load_emulators

        if missing := load_emulators():
            pytest.exit(missing)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print(time.process_time(), nodeid, file=self.started)

    def pytest_sessionfinish(self) -> None:
        if self.started is not None:
            print(time.process_time(), "", file=self.started)


class Server:
    """One suite's tests, ready to run on the library that is put into `folder`."""

    def __init__(self, files: tuple[str, ...], chosen: str, folder: Path) -> None:
        self.folder = folder
        orders, order = os.pipe()
        answer, answers = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(order)
            os.close(answer)
            self._serve(files, chosen, orders, answers)
        os.close(orders)
        os.close(answers)
        self.orders, self.answers = os.fdopen(order, "w"), os.fdopen(answer)
        collected = self.answers.readline()
        if not collected:
            self.close()
            raise Stale(f"pytest says\n{self._log('collected')[-2500:]}")
        self.tests: list[str] = json.loads(collected)

    def _serve(self, files: tuple[str, ...], chosen: str, orders: int, answers: int) -> None:
        status = 99
        try:
            out = os.open(self.folder / "collected", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ["SPECDEC_EMU_FOLDER"] = str(self.folder)
            os.environ["SPECDEC_REQUIRE_EMU"] = "1"  # collected now, loaded by each child
            os.chdir(ROOT)
            options = ["-q", "-x", "-s", "-p", "no:cacheprovider", "-m", "not slow", "-k", chosen]
            paths = [f"tests/kernels/{name}" for name in files]
            status = int(pytest.main([*options, *paths], plugins=[_Forks(orders, answers)]))
            sys.stdout.flush()
        finally:
            os._exit(status)

    def run(self, tests: list[str], limit: int) -> Verdict:
        """These tests in this order, until one notices or the time is up."""
        order = {"folder": str(self.folder), "tests": tests, "limit": limit}
        print(json.dumps(order), file=self.orders, flush=True)
        answer = self.answers.readline()
        if not answer:
            raise Stale("the server of the tests is gone")
        status, spent = int(answer.split()[0]), float(answer.split()[1])
        output = self._log("log")
        if status in (2, 3, 4, 5, 99):  # interrupted, internal, usage, nothing collected
            raise Stale(f"pytest says\n{output[-2500:]}")
        if "ImportError" in output or "ModuleNotFoundError" in output:
            raise Stale(f"the tests do not run: {reason(output)}")
        lines = [line.split(" ", 1) for line in self._log(STARTED).splitlines()]
        ran = {
            name: float(after) - float(now) for (now, name), (after, _) in itertools.pairwise(lines)
        }
        if status == 0:
            return Verdict(False, "", "", spent, ran)
        last = [name for _, name in lines if name][-1:]
        why = f"no end within {limit} s" if status in (-9, -24) else reason(output)
        return Verdict(True, why, last[0] if last else "", spent, ran)

    def _log(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        self.orders.close()
        self.answers.close()
        os.waitpid(self.process, 0)


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
