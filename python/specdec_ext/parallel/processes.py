"""The processes of ranks, and signals that come while all of them work."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["end_processes", "interrupts_wait", "is_stopped"]


def is_stopped(pid: int) -> bool:
    """By a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def end_processes(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C is raised behind the block. Only the main thread ever gets it."""
    try:
        before = signal.getsignal(signal.SIGINT)
        came: list[Any] = []
        signal.signal(signal.SIGINT, lambda number, frame: came.append(frame))
    except ValueError:  # another thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(signal.SIGINT, came[0])
