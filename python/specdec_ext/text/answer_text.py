"""The text of an answer: tokens go in, pieces come out that no stop string can take back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from .detokenizer import Detokenizer
from .stop_strings import StopStrings

__all__ = ["AnswerText"]


class AnswerText:
    """One request's text.

    detokenizer  None: no text is wanted, and there is none
    stop         stop strings; what could be the beginning of one is held back
    keeps_stop   the stop string, and the text of the token that ends it, belong to the answer
    pieces       (text, its source; None: not drafted), in order; never taken back
    """

    def __init__(
        self, detokenizer: Detokenizer | None, stop: Sequence[str], *, keeps_stop: bool
    ) -> None:
        self.pieces: list[tuple[str, str | None]] = []
        self._detokenizer = detokenizer
        self._keeps_stop = keeps_stop
        self._watches = bool(stop)
        self._stops = StopStrings(stop)
        self._held: deque[tuple[str, str | None]] = deque()  # could be cut by a stop string
        self._joined = ("", 0)  # the text of the first pieces, and how many those are

    @property
    def is_wanted(self) -> bool:
        """There is text at all."""
        return self._detokenizer is not None

    def push(self, token: int, source: str | None, *, ends: bool, may_stop: bool) -> str | None:
        """Add a token. The stop string that completed, if one did.

        ends      it is the token that ends the request
        may_stop  a stop string counts by now
        """
        if self._detokenizer is None or (ends and not self._keeps_stop):
            return None
        piece = self._detokenizer.push(token)
        if not piece:
            return None
        if not self._watches:
            self.pieces.append((piece, source))
            return None
        found = self._stops.feed(piece, may_stop=may_stop)
        if found is None:
            self._held.append((piece, source))
            self._release(keep=self._stops.held_chars)
            return None
        end, stop = found
        self._held.append((piece[:end], source))
        self._release(keep=0 if self._keeps_stop else len(stop))
        self._held.clear()
        return stop

    def finish(self) -> None:
        """The request ends, and not with a stop string: all its text is out."""
        tail = "" if self._detokenizer is None else self._detokenizer.finish()
        if tail:
            self._held.append((tail, None))
        self._release(keep=0)

    def joined(self) -> str:
        """All pieces."""
        text, count = self._joined
        if count < len(self.pieces):
            text = "".join([text, *(piece for piece, _ in self.pieces[count:])])
            self._joined = (text, len(self.pieces))
        return text

    def save(self) -> tuple[Any, ...]:
        """Where it stands, for restore()."""
        tokens = None if self._detokenizer is None else self._detokenizer.save()
        return len(self.pieces), deque(self._held), self._stops.save(), tokens

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Be as it was; what was joined meanwhile was not cut."""
        pieces, held, stops, tokens = saved
        del self.pieces[pieces:]
        self._held = deque(held)
        self._stops.restore(stops)
        if self._detokenizer is not None:
            self._detokenizer.restore(tokens)

    def _release(self, keep: int) -> None:
        """Release held text but its last `keep` characters."""
        count = sum(len(text) for text, _ in self._held) - keep
        while count > 0:
            text, source = self._held.popleft()
            if len(text) > count:
                self._held.appendleft((text[count:], source))
                text = text[:count]
            self.pieces.append((text, source))
            count -= len(text)
