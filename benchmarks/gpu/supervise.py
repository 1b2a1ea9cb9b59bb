"""Runs parts, each in a process of its own with a limit of its own.

Code that meets a device for the first time hangs, crashes and leaves errors behind that fail every
later call of its process. So a part is a forked child: what it breaks ends with it. The parent
never opens a device. Before a part begins its record says `started`, so that a machine that goes
away in the middle leaves the name of what it was doing.

    ok unavailable unsupported   done, never run again for this commit
    started                      begun, never finished: the runner was killed with it
    failed                       its work or its check raised
    hung sticky crashed          quarantined: over its limit, the device's context lost, a signal

What has no record comes first, then what was started, failed, quarantined, in that order: a part
that hangs costs its limit once per invocation and keeps nothing from running. What is timed runs
alone; what is only checked runs beside other checks, because most of its time is a process that
opens a device.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import DONE, Store, scrub

LIMIT_S = 60.0
PROBE_S = 30.0
GRACE_S = 5.0  # for a killed child to go: a process in the driver may take a moment
TAIL = 3000  # characters of a part's output that are kept
QUARANTINED = ("hung", "sticky", "crashed")
LATER = {"started": 1, "failed": 2, **dict.fromkeys(QUARANTINED, 3)}
# After these every call of the process fails: they say nothing about the part that comes next.
STICKY = re.compile(
    r"illegal memory access|illegal address|misaligned address|illegal instruction|"
    r"invalid program counter|launch failure|launch timed out|device-side assert triggered|"
    r"not supported on global/shared address space|hardware stack error|"
    r"uncorrectable (?:ECC|NVLink)|(?:CUDA error|launch of [^:\n]+): unknown error"
)

Work = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """One thing to run; `work` is called in the child and returns the part's record.

    alone  it is timed: nothing may run beside it
    """

    stage: str
    name: str
    work: Work
    limit_s: float = LIMIT_S
    alone: bool = True


@dataclass(frozen=True)
class Outcome:
    """What became of a child: its record, seconds, and what it printed last."""

    record: dict[str, Any]
    seconds: float


@dataclass
class Progress:
    """What an invocation did: names of parts."""

    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    device_gone: str = ""  # the part after which the device did not answer

    def add(self, later: Progress) -> None:
        self.done += later.done
        self.failed += later.failed
        self.left += later.left
        self.device_gone = later.device_gone


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent goes: nothing keeps a device busy that
    nobody reads. Linux only; elsewhere a hanging child outlives a killed runner."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGKILL))


def _child(work: Work, record_path: Path, log: Path, parent: int) -> None:
    """The forked process: never returns."""
    code = 1
    try:
        os.setsid()  # its own commands end with it
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(output, stream)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        try:
            record = work()
        except BaseException as error:  # whatever it is, it is this part's result
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
            record = {"status": "failed", "error": scrub(text)[:2000]}
        sys.stdout.flush()
        sys.stderr.flush()
        new = record_path.with_suffix(".new")
        new.write_text(json.dumps(record))
        new.replace(record_path)
        code = 0
    finally:
        os._exit(code)


class Child:
    """A forked process that does `work`, with its output in `log`."""

    def __init__(self, work: Work, limit_s: float, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._record_path = log.with_suffix(".record")
        self._record_path.unlink(missing_ok=True)
        self._limit_s = limit_s
        sys.stdout.flush()
        sys.stderr.flush()
        self._started = time.monotonic()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _child(work, self._record_path, log, parent)

    def poll(self) -> Outcome | None:
        """Returns what became of it, None while it runs; kills it at its limit."""
        done, status = os.waitpid(self._pid, os.WNOHANG)
        if done:
            return self._outcome(status)
        if time.monotonic() - self._started < self._limit_s:
            return None
        self.kill()
        return self._outcome(None)

    def kill(self) -> None:
        """Kills it and its commands. A process that is stuck in the driver is left behind."""
        kill_all([self])

    def send_kill(self) -> None:
        for kill in (os.killpg, os.kill):
            try:
                kill(self._pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue

    def is_gone(self) -> bool:
        return bool(os.waitpid(self._pid, os.WNOHANG)[0])

    def _outcome(self, status: int | None) -> Outcome:
        seconds = time.monotonic() - self._started
        try:
            record: dict[str, Any] = json.loads(self._record_path.read_text())
        except (OSError, ValueError):
            record = {}
        self._record_path.unlink(missing_ok=True)
        tail = scrub(self._log.read_text(errors="replace"))[-TAIL:] if self._log.exists() else ""
        if status is None:
            summary = f"killed after {self._limit_s:.0f} s"
            record = {"status": "hung", "summary": summary, "output": tail}
        elif not record:
            code = os.waitstatus_to_exitcode(status)
            name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            record = {"status": "crashed", "summary": name, "output": tail}
        elif record["status"] == "failed":
            text = f"{record.get('error', '')}\n{record.get('output', '')}"
            record.setdefault("output", tail)
            if found := STICKY.search(text):
                summary = f"{found[0]}; the device's context was lost"
                record |= {"status": "sticky", "summary": summary}
        return Outcome(record, seconds)


def kill_all(children: Iterable[Child]) -> None:
    """Kills them and waits a moment for all of them together."""
    alive = list(children)
    for child in alive:
        child.send_kill()
    deadline = time.monotonic() + GRACE_S
    while (alive := [c for c in alive if not c.is_gone()]) and time.monotonic() < deadline:
        time.sleep(0.005)


def first_to_end(children: Mapping[Part, Child]) -> tuple[Part, Outcome]:
    """Waits until one of some children has ended."""
    pause = 0.005
    while True:
        for part, child in children.items():
            outcome = child.poll()
            if outcome is not None:
                return part, outcome
        time.sleep(pause)
        pause = min(0.2, pause * 1.5)


def isolated(work: Work, limit_s: float, log: Path) -> Outcome:
    """Runs `work` in a forked child; its output goes to `log`. Never raises for what it does."""
    child = Child(work, limit_s, log)
    try:
        return first_to_end({Part("", "", work): child})[1]
    except BaseException:  # Ctrl-C
        child.kill()
        raise


def in_order(parts: Sequence[Part], store: Store) -> list[Part]:
    """Returns what is still to run: stages as given within a rank, ranks as above."""
    waiting = [part for part in parts if not store.has(part.stage, part.name)]

    def rank(part: Part) -> int:
        record = store.cells(part.stage).get(part.name, {})
        return LATER.get(record.get("status", ""), 0)

    return sorted(waiting, key=rank)  # a stable sort


def run_parts(
    parts: Sequence[Part],
    store: Store,
    logs: Path,
    deadline: float,
    probe: Work | None = None,
    jobs: int = 1,
) -> Progress:
    """Runs what has no result yet; writes the store before and after every part.

    parts     in the order in which they are wanted
    logs      folder of what the parts print
    deadline  time.monotonic(); a part whose limit reaches beyond it is left for the next run, so
              that no part is called hung for want of time
    probe     raises if the device does not answer; asked after a part was quarantined
    jobs      parts that run beside each other, of those that may
    """
    run = _Run(store, logs, probe)
    waiting = in_order(parts, store)
    try:
        while waiting or run.children:
            if waiting and run.has_room_for(waiting[0], jobs):
                part = waiting.pop(0)
                if run.progress.device_gone or time.monotonic() + part.limit_s > deadline:
                    run.progress.left.append(part.name)
                else:
                    run.start(part)
            else:
                run.finish(*first_to_end(run.children))
    except BaseException:  # Ctrl-C
        kill_all(run.children.values())
        raise
    return run.progress


class _Run:
    """The parts of one invocation: those that run, and what became of the others."""

    def __init__(self, store: Store, logs: Path, probe: Work | None) -> None:
        self.progress = Progress()
        self.children: dict[Part, Child] = {}
        self._store = store
        self._logs = logs
        self._probe = probe
        self._stage = ""  # the last one printed

    def has_room_for(self, part: Part, jobs: int) -> bool:
        if not self.children:
            return True
        return len(self.children) < jobs and not part.alone and not next(iter(self.children)).alone

    def start(self, part: Part) -> None:
        tries = {"tries": self._tries(part) + 1}
        started = {"status": "started", "limit_s": part.limit_s, **tries}
        self._store.put(part.stage, part.name, started)
        log = self._logs / f"{part.stage}-{part.name}.log"
        self.children[part] = Child(part.work, part.limit_s, log)

    def _tries(self, part: Part) -> int:
        return int(self._store.cells(part.stage).get(part.name, {}).get("tries", 0))

    def finish(self, part: Part, outcome: Outcome) -> None:
        del self.children[part]
        if part.stage != self._stage:
            self._stage = part.stage
            print(f"== {part.stage}", flush=True)
        record = {**outcome.record, "seconds": round(outcome.seconds, 1)}
        good = record["status"] in DONE
        tries = {} if good else {"tries": self._tries(part)}
        self._store.put(part.stage, part.name, record | tries)
        (self.progress.done if good else self.progress.failed).append(part.name)
        what = record.get("us") or record.get("summary") or record.get("error") or ""
        print(f"  {part.name}: {record['status']} {what} ({outcome.seconds:.1f} s)", flush=True)
        if record["status"] in QUARANTINED and self._probe is not None:
            answer = isolated(self._probe, PROBE_S, self._logs / "probe.log")
            if answer.record["status"] not in DONE:
                self.progress.device_gone = part.name
                self._abandon()

    def _abandon(self) -> None:
        """What runs beside a part that took the device with it could only wait for it."""
        kill_all(self.children.values())
        self.progress.left += [part.name for part in self.children]
        self.children.clear()
