"""The n-gram pool of prompt lookup as an external loop (TensorRT-LLM's first style).

A pool belongs to one request. It maps a pattern (the last tokens) to the continuations that stood
after it in the text; what is proposed is one of them, copied.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PromptLookupPool"]


class PromptLookupPool:
    """Patterns of 1..max_matching_ngram_size tokens and their continuations, in order of arrival.

    max_draft_len            K, tokens of a continuation at most
    max_matching_ngram_size  M, the longest pattern; longer ones are tried first
    is_keep_all              keep every continuation of a pattern, else only the newest
    is_use_oldest            propose the oldest continuation, else the newest
    """

    def __init__(
        self,
        max_draft_len: int,
        max_matching_ngram_size: int,
        is_keep_all: bool = True,
        is_use_oldest: bool = True,
    ) -> None:
        self._length = max_draft_len
        self._size = max_matching_ngram_size
        self._keep_all = is_keep_all
        self._use_oldest = is_use_oldest
        self._known = 0  # tokens of the text that are indexed
        # A dict is an ordered set: continuations by first arrival.
        self._pool: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}

    def extend(self, text: Sequence[int]) -> None:
        """Index what is new in `text`, which continues the text of the last call.

        The last K + M - 1 known tokens are looked at again: their continuations were cut short by
        the end of the text.
        """
        start = max(0, self._known - (self._length + self._size - 1))
        for size in range(min(self._size, len(text) - 1), 0, -1):
            for i in range(start, len(text) - size):
                pattern = tuple(text[i : i + size])
                follow = tuple(text[i + size : i + size + self._length])
                known = self._pool.get(pattern)
                first = next(iter(known)) if known else ()
                if known is None or not self._keep_all or len(first) < self._length:
                    self._pool[pattern] = {follow: None}
                else:
                    for cut in range(1, len(follow)):  # what the end of the text had cut short
                        known.pop(follow[:cut], None)
                    known.setdefault(follow)
        self._known = len(text)

    def propose(self, text: Sequence[int]) -> list[int]:
        """Up to K drafts for what follows `text`; empty: its end has not occurred before."""
        for size in range(min(self._size, len(text) - 1), 0, -1):
            known = self._pool.get(tuple(text[-size:]))
            if known:
                found = next(iter(known)) if self._use_oldest else next(reversed(known))
                return list(found)
        return []

    def __len__(self) -> int:
        """Continuations held."""
        return sum(len(known) for known in self._pool.values())
