"""How far it pays to extend a draft model's chains.

A draft costs its pass of the draft model, D(rows), and its row in the target's, T(rows + 1) -
T(rows); it yields a token if it and all before it are accepted. Drafting continues
while the chance of that is worth the time, at the rate at which the engine makes tokens anyway (the
optimal stopping rule of a renewal process). The chances are learnt: how often drafts came true that
the draft model gave such a probability, of this request, leaning on all while it is young.

The decision to draft on is always made before the next draft is drawn, so what is drawn keeps its
distribution. Drafts that are compared by identity may also be dropped afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..step_cost import StepCost, cut_drafts

__all__ = ["ConfidenceRates", "DraftBudget", "Pace"]

_BUCKETS = 12
_PRIOR_WEIGHT = 6.0
_DECAY = 0.99


class ConfidenceRates:
    """Chance that a draft comes true, by the probability that the draft model gave it."""

    def __init__(self, shared: ConfidenceRates | None = None) -> None:
        self._shared = shared
        self._hits = [0.0] * _BUCKETS
        self._tries = [0.0] * _BUCKETS
        self._level_hits = 0.0
        self._level_tries = 0.0

    def rate(self, confidence: float) -> float:
        """The chance for a draft with this confidence whose predecessors came true."""
        bucket = _bucket(confidence)
        # The start: a model that knows its own mind, a little less than it says.
        base = 0.9 * confidence if self._shared is None else self._shared.rate(confidence)
        tries = self._tries[bucket] + _PRIOR_WEIGHT
        return (self._hits[bucket] + _PRIOR_WEIGHT * base) / tries

    def level_rate(self) -> float:
        """The chance that a draft of the next level, not drafted yet, comes true."""
        base = 0.6 if self._shared is None else self._shared.level_rate()
        return (self._level_hits + _PRIOR_WEIGHT * base) / (self._level_tries + _PRIOR_WEIGHT)

    def observe(self, confidence: float, came_true: bool) -> None:
        """A draft whose predecessors came true."""
        bucket = _bucket(confidence)
        self._hits[bucket] = self._hits[bucket] * _DECAY + came_true
        self._tries[bucket] = self._tries[bucket] * _DECAY + 1.0
        if self._shared is not None:
            self._shared.observe(confidence, came_true)

    def observe_level(self, came_true: bool) -> None:
        """All drafts behind the same token: did one of them come true?"""
        self._level_hits = self._level_hits * _DECAY + came_true
        self._level_tries = self._level_tries * _DECAY + 1.0
        if self._shared is not None:
            self._shared.observe_level(came_true)


def _bucket(confidence: float) -> int:
    return min(_BUCKETS - 1, int(confidence * _BUCKETS))


class Pace(Protocol):
    """One request as the budget sees it during a round."""

    rates: ConfidenceRates
    survival: list[float]  # of each draft: the chance that it and all before it come true
    adaptive: bool
    idle: int  # rounds since it last drafted
    patience: int  # rounds to wait before trying again

    @property
    def may_drop(self) -> bool:
        """Its drafts are compared by identity."""
        ...


class DraftBudget:
    """Decides for all requests of a step; see the module's text."""

    MAX_PATIENCE = 64
    FIRST_PATIENCE = 8

    def __init__(self) -> None:
        self._costs: tuple[StepCost, StepCost] | None = None  # target's, draft's, as measured
        self._target: StepCost | None = None  # for the contexts of this round
        self._draft: StepCost | None = None
        self._speedup = 1.0  # tokens per second against plain decoding, a moving average
        self._plain = 0.0  # tokens per second of plain decoding in this round
        self._rate = 0.0  # what a second is worth in this round, in tokens
        self._rows = 0  # of the target's pass, as decided so far
        self._requests = 0
        self._spent = 0.0
        self._expected = 0.0

    @property
    def known(self) -> bool:
        return self._target is not None

    @property
    def speedup(self) -> float:
        """Expected tokens per second against plain decoding, a moving average."""
        return self._speedup

    def set_costs(self, target: StepCost, draft: StepCost) -> None:
        """From the next round on."""
        self._costs = target, draft

    def begin(self, num_requests: int, context_len: float = 0.0) -> None:
        """A round for `num_requests` decoding requests, `context_len` tokens long on average."""
        if self._costs is None:
            return
        self._target, self._draft = (cost.at(num_requests, context_len) for cost in self._costs)
        self._rows = self._requests = num_requests
        self._plain = num_requests / self._target(num_requests)
        self._rate = self._plain * max(1.0, self._speedup)
        self._spent = 0.0
        self._expected = float(num_requests)

    def choose(self, paces: Sequence[Pace]) -> list[bool]:
        """For whom one more draft pays, in a pass that they share."""
        if self._target is None or self._draft is None:
            return [True] * len(paces)
        # Who drafts a fixed length pays whatever it costs; the others may join the pass.
        chosen = [not pace.adaptive for pace in paces]
        fixed = sum(chosen)
        gains = [
            (pace.survival[-1] if pace.survival else 1.0) * pace.rates.level_rate()
            for pace in paces
        ]
        free = [i for i, taken in enumerate(chosen) if not taken]
        kept, _, _ = cut_drafts(
            [[gains[i]] for i in free],
            self._target,
            rows=self._rows + fixed,
            tokens=self._expected,
            rate=self._rate,
            pass_cost=self._draft,
            pass_rows=fixed,
        )
        for i, nodes in zip(free, kept, strict=True):
            chosen[i] = len(nodes) > 0
        for i, pace in enumerate(paces):
            if not pace.survival and pace.adaptive:
                chosen[i] = self._now_and_then(pace, chosen[i])
        return chosen

    def levels(self, pace: Pace, top_k: int, max_nodes: int, max_depth: int) -> int:
        """How deep a tree pays for this request: the passes, and the rows of its nodes."""
        if self._target is None or self._draft is None or not pace.adaptive:
            return max_depth
        rate = pace.rates.level_rate()
        best, best_net, gain, passes, reach = 0, 0.0, 0.0, 0.0, 1.0
        before = self._target(self._rows)
        for depth in range(1, max_depth + 1):
            reach *= rate
            gain += reach
            passes += self._draft(1 + top_k * (depth - 1))
            rows = self._target(self._rows + min(max_nodes, top_k * depth)) - before
            net = gain - self._rate * (passes + rows)
            if net > best_net:
                best, best_net = depth, net
        return max(best, 1) if self._now_and_then(pace, best > 0) else 0

    def _now_and_then(self, pace: Pace, pays: bool) -> bool:
        """A request that does not draft learns nothing: it tries again, ever more rarely."""
        if pays:
            pace.idle, pace.patience = 0, self.FIRST_PATIENCE
            return True
        pace.idle += 1
        if pace.idle < pace.patience:
            return False
        pace.idle, pace.patience = 0, min(self.MAX_PATIENCE, 2 * pace.patience)
        return True

    def spend(self, rows: int) -> None:
        """Note a pass of the draft model with `rows` rows besides those of prompts."""
        if self._draft is not None:
            self._spent += self._draft(rows)

    def add(self, pace: Pace, confidence: float) -> None:
        """A draft was made."""
        before = pace.survival[-1] if pace.survival else 1.0
        pace.survival.append(before * pace.rates.rate(confidence))
        self._rows += 1

    def drop(self, pace: Pace) -> None:
        """Take back the drafts at the end of a chain that are not worth their rows."""
        if self._target is None or not pace.adaptive or not pace.may_drop:
            return
        while pace.survival:
            row = self._target(self._rows) - self._target(self._rows - 1)
            if pace.survival[-1] >= self._rate * row:
                return
            pace.survival.pop()
            self._rows -= 1

    def cut_tree(self, parents: Sequence[int], rates: Sequence[float]) -> list[int]:
        """The nodes of a tree that are worth their rows, ascending and closed under parents.

        rates[i]: the chance of node i if its parent came true. Each cut is weighed as the rest of
        the step it would be: tokens per second of the target's pass.
        """
        assert self._target is not None
        value: list[float] = []
        for parent, rate in zip(parents, rates, strict=True):
            value.append(rate if parent < 0 else min(1.0, rate) * value[parent])
        (kept,), self._expected, _ = cut_drafts(
            [value], self._target, rows=self._rows, tokens=self._expected, rate=self._rate
        )
        self._rows += len(kept)
        nodes: list[int] = kept.tolist()
        return nodes

    def end(self, paces: Sequence[Pace]) -> None:
        """The round's drafts are final."""
        if self._target is None:
            return
        self._expected += sum(sum(pace.survival) for pace in paces)
        seconds = self._spent + self._target(self._rows)
        self._speedup += 0.05 * (self._expected / seconds / self._plain - self._speedup)
