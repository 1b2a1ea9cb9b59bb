"""Runs parts one after another, each in a process of its own with a limit of its own.

Code that meets a device for the first time hangs, crashes and leaves errors behind that fail every
later call of its process. So a part is a forked child: what it breaks ends with it. The parent
never opens a device. Before a part begins its record says `started`, so that a machine that goes
away in the middle leaves the name of what it was doing.

    ok unavailable unsupported   done, never run again for this commit
    started                      begun, never finished: the runner was killed with it
    failed                       its work or its check raised
    hung sticky crashed          quarantined: over its limit, the device's context lost, a signal

What has no record comes first, then what was started, failed, quarantined, in that order: a part
that hangs costs its limit once per invocation and keeps nothing from running.
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
from collections.abc import Callable, Sequence
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
    r"invalid program counter|launch failure|launch timed out|device-side assert|"
    r"hardware stack error|uncorrectable ECC|CUDA error: unknown error"
)

Work = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """One thing to run; `work` is called in the child and returns the part's record."""

    stage: str
    name: str
    work: Work
    limit_s: float = LIMIT_S


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


def _wait(pid: int, limit_s: float) -> int | None:
    """Returns a child's wait status, None if it has not ended in time."""
    deadline = time.monotonic() + limit_s
    pause = 0.005
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(pause, left))
        pause = min(0.2, pause * 1.5)


def _kill(pid: int) -> None:
    """Kills a child and its commands. A process that is stuck in the driver is left behind."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    _wait(pid, GRACE_S)


def isolated(work: Work, limit_s: float, log: Path) -> Outcome:
    """Runs `work` in a forked child; its output goes to `log`. Never raises for what it does."""
    log.parent.mkdir(parents=True, exist_ok=True)
    record_path = log.with_suffix(".record")
    record_path.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(work, record_path, log, parent)
    try:
        status = _wait(pid, limit_s)
        if status is None:
            _kill(pid)
    except BaseException:  # Ctrl-C
        _kill(pid)
        raise
    seconds = time.monotonic() - started
    try:
        record: dict[str, Any] = json.loads(record_path.read_text())
    except (OSError, ValueError):
        record = {}
    record_path.unlink(missing_ok=True)
    tail = scrub(log.read_text(errors="replace"))[-TAIL:] if log.exists() else ""
    if status is None:
        record = {"status": "hung", "summary": f"killed after {limit_s:.0f} s", "output": tail}
    elif not record:
        code = os.waitstatus_to_exitcode(status)
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        record = {"status": "crashed", "summary": name, "output": tail}
    elif record["status"] == "failed":
        text = f"{record.get('error', '')}\n{record.get('output', '')}"
        record.setdefault("output", tail)
        if found := STICKY.search(text):
            record |= {"status": "sticky", "summary": f"{found[0]}; the device's context was lost"}
    return Outcome(record, seconds)


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
) -> Progress:
    """Runs what has no result yet; writes the store before and after every part.

    parts     in the order in which they are wanted
    logs      folder of what the parts print
    deadline  time.monotonic(); a part whose limit reaches beyond it is left for the next run, so
              that no part is called hung for want of time
    probe     raises if the device does not answer; asked after a part was quarantined
    """
    progress = Progress()
    stage = ""
    for part in in_order(parts, store):
        if progress.device_gone or time.monotonic() + part.limit_s > deadline:
            progress.left.append(part.name)
            continue
        if part.stage != stage:
            stage = part.stage
            print(f"== {stage}", flush=True)
        before = store.cells(part.stage).get(part.name, {})
        tries = {"tries": before.get("tries", 0) + 1}
        store.put(part.stage, part.name, {"status": "started", "limit_s": part.limit_s, **tries})
        log = logs / f"{part.stage}-{part.name}.log"
        outcome = isolated(part.work, part.limit_s, log)
        record = {**outcome.record, "seconds": round(outcome.seconds, 1)}
        good = record["status"] in DONE
        store.put(part.stage, part.name, record if good else record | tries)
        (progress.done if good else progress.failed).append(part.name)
        what = record.get("us") or record.get("summary") or record.get("error") or ""
        print(f"  {part.name}: {record['status']} {what} ({outcome.seconds:.1f} s)", flush=True)
        if record["status"] in QUARANTINED and probe is not None:
            answer = isolated(probe, PROBE_S, logs / "probe.log")
            if answer.record["status"] not in DONE:
                progress.device_gone = part.name
    return progress
