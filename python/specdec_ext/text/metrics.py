"""Counting of steps and drafts, per request and per engine (definitions: docs/metrics.md).

Only what was delivered is counted: when a stop string cuts a step short, the drafts after the cut
are not "accepted". A step counts as a speculative step when it verified at least one draft.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RequestTimer", "SpecCounter", "describe_budget", "describe_preemptions", "ratio"]


def ratio(part: float, whole: float) -> float:
    """part / whole, 0.0 where nothing was counted: JSON has no NaN."""
    return part / whole if whole else 0.0


def describe_budget(stats: Mapping[str, Any]) -> str | None:
    """What adaptive drafting chose, and why where it chose nothing, in one line.

    stats  `executor` of get_metrics(). None: no draft was ever weighed.
    """
    weighed, refused = stats.get("budget_weighed", 0), stats.get("budget_refused", 0)
    if not weighed:
        return None
    text = f"adaptive drafting: drafts paid in {weighed - refused} of {weighed} offers"
    if stats["budget_probes"]:
        text += f", {stats['budget_probes']} more drafted to learn"
    if refused:
        tokens = stats["budget_refused_tokens"] / refused
        price = stats["budget_refused_price"] / refused
        text += (
            f"; in the others the best drafts were expected to bring {tokens:.2f} tokens more in "
            f"{price:.2f} times the time (adaptive=False or --no-adaptive drafts all the same)"
        )
    return text


def describe_preemptions(stats: Mapping[str, Any]) -> str | None:
    """How requests got their K/V back that had given their pages away, in one line.

    stats  `executor` of get_metrics(). None: none had to.
    """
    count = stats.get("preemptions", 0)
    if not count:
        return None
    text = f"preemptions: {count}, {stats['recomputed_tokens']} tokens read again"
    if stats["host_total_pages"]:
        text += (
            f"; {stats['swapped_out']} swapped to the host ({stats['swapped_out_bytes'] / 1e6:.1f} "
            f"MB), {stats['swapped_in']} back ({stats['swapped_in_bytes'] / 1e6:.1f} MB), "
            f"{stats['host_pool_full']} found no room there"
        )
    return text


@dataclass
class SpecCounter:
    """Speculation of one request (keep_steps) or of many.

    num_spec_tokens  drafts on the deepest path that a step may accept: prompt lookup K; lookahead
                     N-1, or more once a step has confirmed a longer path through the window. The
                     histogram has one bin more
    """

    num_spec_tokens: int
    keep_steps: bool = True
    num_steps: int = 0
    num_spec_steps: int = 0
    num_accepted: int = 0
    num_drafts: int = 0
    num_prefill_steps: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    histogram: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)
    # Drafts and accepted drafts by who has proposed them; a draft may be of several.
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.histogram:
            self.histogram = [0] * (self.num_spec_tokens + 1)

    def _deepen(self, num_spec_tokens: int) -> None:
        self.num_spec_tokens = max(self.num_spec_tokens, num_spec_tokens)
        self.histogram += [0] * (self.num_spec_tokens + 1 - len(self.histogram))

    def tokens_of(self, source: str) -> dict[str, int]:
        """Drafts of a source, by what became of them: `accepted_<source>_tokens`, ..."""
        drafts, accepted = self.by_source.get(source, (0, 0))
        return {
            f"accepted_{source}_tokens": accepted,
            f"rejected_{source}_tokens": drafts - accepted,
        }

    @property
    def draft_sources(self) -> dict[str, dict[str, int]]:
        """Drafts and accepted drafts of each source that has proposed any."""
        return {
            source: {"drafts": drafts, "accepted": accepted}
            for source, (drafts, accepted) in self.by_source.items()
        }

    def count_source(self, source: str, drafts: int, accepted: int) -> None:
        """Add what `source` has proposed of a pass's drafts and of its accepted drafts."""
        before = self.by_source.get(source, (0, 0))
        self.by_source[source] = (before[0] + drafts, before[1] + accepted)

    def count(
        self, *, drafts: int, accepted: int, rows: int, tokens: int, is_prefill: bool = False
    ) -> None:
        """One forward pass of a request that delivered `tokens`, `accepted` of them drafts."""
        self.num_steps += 1
        self.num_prefill_steps += is_prefill
        self.num_rows += rows
        self.num_tokens += tokens
        if drafts == 0:
            return
        self.num_spec_steps += 1
        self.num_drafts += drafts
        self.num_accepted += accepted
        # Lookahead may confirm a path through its window that is deeper than a guess of N-1.
        self._deepen(accepted)
        self.histogram[accepted] += 1
        if self.keep_steps:
            self.per_step_accepted.append(accepted)
            self.per_step_drafted.append(drafts)

    def save(self) -> tuple[Any, ...]:
        """Where it stands, for restore()."""
        return (
            self.num_spec_tokens, self.num_steps, self.num_spec_steps, self.num_accepted,
            self.num_drafts, self.num_prefill_steps, self.num_rows, self.num_tokens,
            self.histogram.copy(), self.by_source.copy(),
        )  # fmt: skip

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Go back to where it stood."""
        (
            self.num_spec_tokens, self.num_steps, self.num_spec_steps, self.num_accepted,
            self.num_drafts, self.num_prefill_steps, self.num_rows, self.num_tokens,
            self.histogram, self.by_source,
        ) = saved  # fmt: skip
        del self.per_step_accepted[self.num_spec_steps :]
        del self.per_step_drafted[self.num_spec_steps :]

    def add(self, other: SpecCounter) -> None:
        """Add another counter's sums."""
        for name in ("num_steps", "num_spec_steps", "num_accepted", "num_drafts", "num_rows",
                     "num_prefill_steps", "num_tokens"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for source, (drafts, accepted) in other.by_source.items():
            self.count_source(source, drafts, accepted)
        self._deepen(other.num_spec_tokens)
        for i, steps in enumerate(other.histogram):
            self.histogram[i] += steps

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per speculative step: accepted drafts and the one the model adds."""
        return 1.0 + ratio(self.num_accepted, self.num_spec_steps)

    def to_dict(self) -> dict[str, Any]:
        """`metrics.speculative_decoding` in the shape that vLLM and AIPerf use, plus path_..."""
        result: dict[str, Any] = {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": ratio(self.num_accepted, self.num_drafts),
            "path_acceptance_rate": ratio(
                self.num_accepted, self.num_spec_steps * self.num_spec_tokens
            ),
            "acceptance_histogram": list(self.histogram),
            "num_spec_steps": self.num_spec_steps,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_draft_tokens": self.num_drafts,
            "num_spec_tokens": self.num_spec_tokens,
        }
        if self.keep_steps:
            result["per_step_accepted"] = list(self.per_step_accepted)
            result["per_step_drafted"] = list(self.per_step_drafted)
        return result


@dataclass
class RequestTimer:
    """Wall-clock marks of one request in seconds of time.perf_counter."""

    arrival: float = field(default_factory=time.perf_counter)
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None

    def to_dict(self, num_tokens: int) -> dict[str, float | None]:
        """Milliseconds and tokens/s; None for what has not happened."""

        def span_ms(start: float | None, end: float | None) -> float | None:
            return None if start is None or end is None else (end - start) * 1e3

        decode_ms = span_ms(self.first_token, self.last_token)
        total_ms = span_ms(self.scheduled, self.last_token)
        return {
            "queue_time_ms": span_ms(self.arrival, self.scheduled),
            "time_to_first_token_ms": span_ms(self.arrival, self.first_token),
            "generation_time_ms": total_ms,
            "mean_itl_ms": ratio(decode_ms, num_tokens - 1) if decode_ms is not None else None,
            "tokens_per_second": ratio(num_tokens * 1e3, total_ms) if total_ms else None,
        }
