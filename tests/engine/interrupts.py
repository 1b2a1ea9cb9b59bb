"""KeyboardInterrupt where CPython may raise it: behind calls, jumps back and the starts of frames.

CPython looks for signals there and nowhere else, so an exception that a trace function raises in
front of the instruction behind such a place is a signal that arrived in time for it.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

_LOOKS_FOR_SIGNALS = ("CALL", "RESUME", "JUMP_BACKWARD")


@functools.cache
def places(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions in front of which an interrupt may seem to come.

    Left out is one that another handler guards than the call in front of it: there the trace
    function would raise out of the call's `with`.
    """
    table = getattr(dis, "_parse_exception_table", lambda _: [])(code)

    def handler(offset: int) -> Any:
        return next((e.target for e in table if e.start <= offset < e.end), None)

    found = set()
    before = None
    for instruction in dis.get_instructions(code):
        if before is not None and before.opname.startswith(_LOOKS_FOR_SIGNALS):
            is_part_of_call = before.opname == "PRECALL"
            if not is_part_of_call and handler(before.offset) == handler(instruction.offset):
                found.add(instruction.offset)
        before = instruction
    return frozenset(found)


class Interrupter:
    """Counts the places that run in functions of `files`, and raises at number `at`."""

    def __init__(self, files: tuple[str, ...], at: int | None = None) -> None:
        self._files = files
        self._at = at
        self.count = 0
        self.where: tuple[str, int] | None = None
        self.seen: dict[tuple[CodeType, int], int] = {}  # each place, and when it came first

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "call":
            if not frame.f_code.co_filename.endswith(self._files):
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        elif event == "opcode" and frame.f_lasti in places(frame.f_code):
            self.seen.setdefault((frame.f_code, frame.f_lasti), self.count)
            self.count += 1
            if self.count - 1 == self._at:
                self.where = (frame.f_code.co_qualname, frame.f_lineno)  # type: ignore[attr-defined]
                raise KeyboardInterrupt
        return self._trace

    def run(self, work: Callable[[], Any]) -> Any:
        """Call `work` in this thread."""
        old = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return work()
        finally:
            sys.settrace(old)
