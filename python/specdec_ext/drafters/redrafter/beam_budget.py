"""How many of a drafter's guesses are worth verifying, and whether drafting pays at all.

A draft that is kept with probability p brings p tokens and costs a row. With T(rows) the measured
time of a forward pass and D that of drafting, a step of B requests that verifies the drafts S
delivers B + sum(p) tokens in T(B + |S|) + D seconds; the S that maximises the quotient is a prefix
of all drafts in falling order of p. The drafter's own probabilities are corrected by what was
accepted, per depth: a head that is too sure of itself learns it here.

How many beams are searched follows from how many were worth verifying: each costs the drafter a row
in every pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...config.engine import MAX_DRAFT_LEN
from ..step_cost import StepCost, cut_drafts

__all__ = ["BeamBudget"]

_DECAY = 0.98  # of what was learnt, per observation: about the last 50 steps count
_PRIOR = 2.0  # steps that were as the drafter said, before anything is seen
_DOUBT = 0.1  # added to both sides of a quotient
_MAX_RATIO = 4.0
_FIRST_BEAMS = 2  # that a new engine searches: what a second one adds costs next to nothing
_WIDTH_DECAY = 0.95  # of the beams searched, per step that needs fewer
# The expected ratio of speeds, with drafts to without, from which drafting is worth it: the
# expectation leaves out what a step does besides the two networks.
_WORTH = 1.03
_PROBE = 16  # where drafting does not pay, one step in 16 drafts all the same


class BeamBudget:
    """One per engine; called from the stepping thread.

    Without a step cost it keeps every draft.

    max_depth  drafts on the longest path
    """

    def __init__(self, max_depth: int = MAX_DRAFT_LEN) -> None:
        self._measured: StepCost | None = None
        self._cost: StepCost | None = None  # for the contexts of this step
        self._max_depth = max_depth
        # By depth, 0 unused: sums of what the drafter said, and of what was kept. Lists: paths are
        # short, and an array's operation costs as much as ten of these numbers.
        self._said = [_PRIOR] * (max_depth + 1)
        self._seen = [_PRIOR] * (max_depth + 1)
        self._ratios = [1.0] * (max_depth + 1)
        self._pass_seconds = 0.0  # of one pass of the drafter
        # By batch size class: speed with drafts over without, beams that are worth searching.
        self._gain: dict[int, float] = {}
        self._width: dict[int, float] = {}
        self._since_draft = 0
        self.skipped = 0

    def set_step_cost(self, cost: StepCost) -> None:
        """Take the cost table of the target's forward pass."""
        self._measured = self._cost = cost

    def begin(self, batch: int, context_len: float) -> None:
        """A step of `batch` requests with so many tokens in the cache, on average."""
        if self._measured is not None:
            self._cost = self._measured.at(batch, context_len)

    @property
    def known(self) -> bool:
        return self._cost is not None

    def wants_drafts(self, batch: int) -> bool:
        """False where drafting for `batch` requests has not paid lately, but for a probe."""
        if not self.known or self._gain.get(batch.bit_length(), 2.0) >= _WORTH:
            self._since_draft = 0
            return True
        self._since_draft += 1
        if self._since_draft >= _PROBE:
            self._since_draft = 0
            return True
        self.skipped += 1
        return False

    def num_beams(self, batch: int) -> int | None:
        """Beams to search for each of `batch` requests: one more than were worth verifying lately.

        None: as many as are asked for, because the cost of a step is not known.
        """
        if self._cost is None:
            return None
        return math.ceil(self._width.get(batch.bit_length(), _FIRST_BEAMS))

    def note_beams(self, batch: int, verified: int) -> None:
        """Note that no request had more than `verified` beams in the step."""
        key = batch.bit_length()
        width = self._width.get(key, _FIRST_BEAMS)
        self._width[key] = max(verified + 1.0, _WIDTH_DECAY * width)

    @property
    def pass_seconds(self) -> float:
        """Seconds of a recent pass of the drafter; 0: none was noted."""
        return self._pass_seconds

    def note_pass(self, seconds: float) -> None:
        """One pass of the drafter took this long."""
        old = self._pass_seconds
        self._pass_seconds = seconds if old == 0.0 else min(0.9 * old + 0.1 * seconds, 2 * old)

    def depth_gains(self, batch: int, length: int) -> list[float]:
        """[length - 1]: what going on behind beams of 1, 2, ... drafts is worth at best for them.

        In seconds per expected draft at that depth and per request of `batch`; a further pass pays
        if the sum of the beams' probabilities times this is no less than `pass_seconds`. Empty
        where the cost of a step is not known: then every depth is searched.
        """
        if self._cost is None:
            return []
        saved = self._cost(batch) / batch
        return [saved * self._ratio(d) * self._survival(d) for d in range(1, length)]

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
        ratios = np.array(self._ratios)
        likelihood = [np.minimum(1.0, np.exp(logs) * ratios[depths]) for depths, logs in trees]
        batch = len(trees)
        drafting = passes * self._pass_seconds
        kept, _, speedup = cut_drafts(
            likelihood, self._cost, rows=batch + other_rows, tokens=float(batch), spent=drafting
        )
        plain = self._cost(batch + other_rows)  # without the beam search, too
        self._note_gain(batch, speedup * plain / (plain + drafting))
        return [len(nodes) for nodes in kept]

    def observe(self, expected_by_depth: Sequence[float], accepted: int) -> None:
        """A verified tree: sum of probabilities of its drafts at depth 1, 2, ..., drafts kept."""
        said, seen, drafted = self._said, self._seen, len(expected_by_depth)
        # Never growing with depth, so that a draft is never likelier than its parent.
        ratio = _MAX_RATIO
        for depth in range(1, self._max_depth + 1):
            if depth <= drafted:
                more_said = min(expected_by_depth[depth - 1], 1.0)
                more_seen = 1.0 if depth <= accepted else 0.0
            else:  # what is not tried any more is believed again, little by little
                more_said = more_seen = _PRIOR * (1.0 - _DECAY)
            said[depth] = _DECAY * said[depth] + more_said
            seen[depth] = _DECAY * seen[depth] + more_seen
            ratio = min(ratio, (seen[depth] + _DOUBT) / (said[depth] + _DOUBT))
            self._ratios[depth] = ratio

    def _note_gain(self, batch: int, gain: float) -> None:
        key = batch.bit_length()
        self._gain[key] = 0.8 * self._gain.get(key, gain) + 0.2 * gain

    def _ratio(self, depth: int) -> float:
        """What was kept at this depth over what was said."""
        return self._ratios[min(depth, self._max_depth)]

    def _survival(self, depth: int) -> float:
        """The observed share of the paths kept to this depth that continue beyond it."""
        at = min(depth, self._max_depth - 1)
        return min(1.0, (self._seen[at + 1] + _DOUBT) / (self._seen[at] + _DOUBT))
