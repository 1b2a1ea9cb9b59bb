"""What a request's steps drafted, accepted and took, kept for SamplingParams.return_steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..text.outputs import StepDraft, StepRecord

__all__ = ["StepRecords"]


class StepRecords:
    """The records of one request, in order.

    sources  what sources are called, as source_names() gives it
    """

    def __init__(self, sources: tuple[tuple[str, ...], str]) -> None:
        self._names, self._own = sources
        self.items: list[StepRecord] = []

    def add(self, out: Any, tokens: Sequence[int], begin_s: float, end_s: float) -> None:
        """One step.

        out              its StepOutput
        tokens           of them those that were delivered: a stop string cuts off the last
        begin_s, end_s   from the request's submission on
        """
        accepted = min(out.num_accepted, len(tokens))
        drafts, left = [], accepted
        for draft in out.drafts:  # a path's nodes come in order: what was cut off are the last
            taken = draft.accepted and left > 0
            left -= taken
            sources = tuple([self._names[source] for source in draft.sources]) or (self._own,)
            drafts.append(StepDraft(draft.token, draft.parent, taken, sources))
        self.items.append(
            StepRecord(
                begin_ms=begin_s * 1e3,
                end_ms=end_s * 1e3,
                is_prefill=out.is_prefill,
                num_rows=out.num_rows,
                token_ids=tuple(tokens),
                num_accepted=accepted,
                drafts=tuple(drafts),
            )
        )
