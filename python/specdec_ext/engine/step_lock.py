"""One step at a time: who may begin one, and who would wait for ever."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Protocol

from ..errors import EngineError

__all__ = ["StepLock", "close_at_exit"]

_forks = 0  # that led from the process in which this module was read to this one


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
    """No thread may be inside a step when the interpreter goes down."""
    _engines.add(engine)


class StepLock:
    """`with self.lock:` around a step; check() before it, because the lock may never come free.

    The lock is never taken twice by one thread: it is an RLock because that knows its owner.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._pid = os.getpid()
        self._forks = _forks

    @property
    def is_a_fork(self) -> bool:
        """This process is a child of the one that made the engine."""
        return self._forks != _forks

    def refuse_in_fork(self) -> None:
        if self.is_a_fork:
            raise EngineError(
                f"this LLM was made in process {self._pid} and does not work in process "
                f"{os.getpid()}, a fork of it: its threads and locks stayed behind; make the LLM "
                "in the child, or start children with multiprocessing's method 'spawn'"
            )

    def check(self, what: str) -> None:
        """Refuse whoever holds the lock already, and a fork, in which nobody gives it back."""
        self.refuse_in_fork()
        if self.lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            raise EngineError(
                f"{what} was called from inside a step of the same LLM (a logits processor, a "
                "drafter, on_update) and would wait for itself; call it after the step, or use "
                "generate_async(), submit or cancel, which do not wait"
            )
