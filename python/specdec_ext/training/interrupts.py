"""Ctrl-C between two steps: what is done is saved before the command ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["CHECKPOINT_SECONDS", "Interrupts", "Stopped"]

# What a run that is killed may lose.
CHECKPOINT_SECONDS = 60.0


class Stopped(KeyboardInterrupt):
    """The run was asked to stop and has saved its state; the same command continues it."""


class Interrupts:
    """While it is entered, SIGINT and SIGTERM set `asked`; a second one interrupts at once.

    Handlers can be set by the main thread alone; in another one `asked` stays false unless
    ask() is called.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def ask(self) -> None:
        self.asked = True

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
