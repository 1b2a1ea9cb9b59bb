"""One step at a time: which thread may begin one, and which would wait for ever."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Protocol

from ..errors import EngineError

__all__ = ["StepLock", "close_at_exit"]

_forks = 0  # from the process that imported this module down to this one


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class _Engine(Protocol):
    def close(self) -> None: ...


_engines: weakref.WeakSet[_Engine] = weakref.WeakSet()


@atexit.register
def _close_engines() -> None:
    for engine in list(_engines):
        engine.close()


def close_at_exit(engine: _Engine) -> None:
    """Close the engine at exit: no thread may be inside a step when the interpreter ends."""
    _engines.add(engine)


class StepLock:
    """Use `with self.lock:` around a step, and check() before it: the lock may never come free.

    No thread takes the lock twice. It is an RLock only because an RLock knows its owner.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._pid = os.getpid()
        self._forks = _forks

    @property
    def is_a_fork(self) -> bool:
        """Whether this process is a child of the one that made the engine."""
        return self._forks != _forks

    def refuse_in_fork(self) -> None:
        if self.is_a_fork:
            raise EngineError(
                f"this LLM was made in process {self._pid} and does not work in process "
                f"{os.getpid()}, a fork of it: its threads and locks stayed behind; make the LLM "
                "in the child, or start children with multiprocessing's method 'spawn'"
            )

    def check(self, what: str) -> None:
        """Refuse a thread that holds the lock, and a fork, in which no thread would release it."""
        self.refuse_in_fork()
        if self.lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            raise EngineError(
                f"{what} was called from inside a step of the same LLM (a logits processor, a "
                "drafter, on_update) and would wait for itself; call it after the step, or use "
                "generate_async(), submit or cancel, which do not wait"
            )
