"""How many of a drafter's guesses are worth verifying, and whether drafting pays at all.

A draft that is kept with probability p brings p tokens and costs a row. With T(rows) the measured
time of a forward pass and D that of drafting, a step of B requests that verifies the drafts S
delivers B + sum(p) tokens in T(B + |S|) + D seconds; the S that maximises the quotient is a prefix
of all drafts in falling order of p. The drafter's own probabilities are corrected by what was
accepted, per depth: a head that is too sure of itself learns it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .step_cost import StepCost

__all__ = ["BeamBudget"]

_DECAY = 0.98  # of what was learnt, per observation: about the last 50 steps count
_PRIOR = 2.0  # steps that were as the drafter said, before anything is seen
_DOUBT = 0.1  # added to both sides of a quotient
_MAX_RATIO = 4.0
_PROBE = 16  # where drafting does not pay, one step in so many drafts all the same
_MAX_DEPTH = 127


class BeamBudget:
    """One per engine; called from the stepping thread.

    Without a step cost it keeps every draft.
    """

    def __init__(self) -> None:
        self._cost: StepCost | None = None
        # By depth, 0 unused: sums of what the drafter said, and of what was kept.
        self._said = np.full(_MAX_DEPTH + 1, _PRIOR)
        self._seen = np.full(_MAX_DEPTH + 1, _PRIOR)
        self._ratios = np.ones(_MAX_DEPTH + 1)
        self._pass_seconds = 0.0  # of one pass of the drafter
        self._gain: dict[int, float] = {}  # batch size class -> speed with drafts over without
        self._since_draft = 0
        self.skipped = 0

    def set_step_cost(self, table: Mapping[int, float]) -> None:
        """{rows of a forward pass: seconds}, two points or more; fewer are ignored."""
        if len(table) >= 2:
            self._cost = StepCost(table)

    @property
    def known(self) -> bool:
        return self._cost is not None

    def wants_drafts(self, batch: int) -> bool:
        """False where drafting for `batch` requests has not paid lately, but for a probe."""
        if not self.known or self._gain.get(batch.bit_length(), 2.0) >= 1.0:
            self._since_draft = 0
            return True
        self._since_draft += 1
        if self._since_draft >= _PROBE:
            self._since_draft = 0
            return True
        self.skipped += 1
        return False

    def note_pass(self, seconds: float) -> None:
        """One pass of the drafter took this long."""
        old = self._pass_seconds
        self._pass_seconds = seconds if old == 0.0 else min(0.9 * old + 0.1 * seconds, 2 * old)

    def wants_deeper(self, depth: int, beam_log_probs: np.ndarray, batch: int) -> bool:
        """Whether a further pass over beams of `depth` >= 1 drafts may pay, at best for them."""
        if self._cost is None:
            return True
        expected = float(np.exp(beam_log_probs).sum()) * self._ratio(depth) * self._survival(depth)
        return expected * self._cost(batch) >= self._pass_seconds * batch

    def choose(
        self, trees: Sequence[tuple[np.ndarray, np.ndarray]], *, passes: int, other_rows: int = 0
    ) -> list[int]:
        """How many drafts of each tree to keep, of those with the largest probability.

        trees       (depths, log_probs) of each request's drafts, a parent before its children
        passes      of the drafter, this step
        other_rows  of requests that are drafted in full
        """
        sizes = [len(depths) for depths, _ in trees]
        if self._cost is None or not trees:
            return sizes
        likelihood = [
            np.minimum(1.0, np.exp(logs) * self._ratios[depths]) for depths, logs in trees
        ]
        owner = np.repeat(np.arange(len(trees)), sizes)
        falling = np.concatenate([-np.sort(-p) for p in likelihood])
        order = np.argsort(-falling, kind="stable")
        batch = len(trees)
        tokens = batch + np.concatenate(([0.0], np.cumsum(falling[order])))
        drafting = passes * self._pass_seconds
        seconds = self._cost.seconds(batch + other_rows, len(order))
        speed = tokens / (seconds + drafting)
        best = int(np.argmax(speed))
        self._note_gain(batch, float(speed[best] * seconds[0] / batch))
        kept = np.bincount(owner[order[:best]], minlength=batch)
        return [int(n) for n in kept]

    def observe(self, expected_by_depth: np.ndarray, accepted: int) -> None:
        """A verified tree: sum of probabilities of its drafts at depth 1, 2, ..., drafts kept."""
        n = min(len(expected_by_depth), _MAX_DEPTH)
        self._said *= _DECAY
        self._seen *= _DECAY
        self._said[1 : n + 1] += np.minimum(expected_by_depth[:n], 1.0)
        self._seen[1 : n + 1] += np.arange(1, n + 1) <= accepted
        # What is not tried any more is believed again, little by little.
        self._said[n + 1 :] += _PRIOR * (1.0 - _DECAY)
        self._seen[n + 1 :] += _PRIOR * (1.0 - _DECAY)
        # Never growing with depth, so that a draft is never likelier than its parent.
        ratio = (self._seen + _DOUBT) / (self._said + _DOUBT)
        ratio[0] = _MAX_RATIO
        self._ratios = np.minimum.accumulate(np.minimum(ratio, _MAX_RATIO))

    def _note_gain(self, batch: int, gain: float) -> None:
        key = batch.bit_length()
        self._gain[key] = 0.8 * self._gain.get(key, gain) + 0.2 * gain

    def _ratio(self, depth: int) -> float:
        """What was kept at this depth over what was said."""
        return float(self._ratios[min(depth, _MAX_DEPTH)])

    def _survival(self, depth: int) -> float:
        """Of the paths kept to this depth, the share that goes on, as seen."""
        at = min(depth, _MAX_DEPTH - 1)
        return float(min(1.0, (self._seen[at + 1] + _DOUBT) / (self._seen[at] + _DOUBT)))
