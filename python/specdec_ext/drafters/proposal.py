"""Drafts that a user's drafter answers with.

A drafter never sees K/V pages of the target, other requests' texts or the plan. Whatever it
proposes, the output is the target's own: a drafter only decides how many forward passes it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._core import random_uniform

__all__ = ["Proposal", "random_uniform"]


@dataclass(frozen=True)
class Proposal:
    """Drafts of one request.

    tokens   ids, a parent before its children
    parents  index of each draft's parent among the drafts, -1 for the golden token; None: a chain
    probs    float32 [len(tokens), V]: row i is the distribution that draft i was drawn from, after
             the request's own temperature and filters; None: chosen without chance (one-hot)
    vocab_ids
             int [V']: probs is [len(tokens), V'], its columns are these tokens; every other token
             has probability 0
    replacement
             siblings were drawn with replacement. False: each, in order, from its row less the
             siblings before it, renormalised (rows that are 0 there already are the same thing). A
             drafter that drops repeated draws has drawn without replacement

    With "rejection" the output has the target's law only if probs tell the truth: the row is what
    the draft was drawn *from*. A draft chosen as the most likely token was not drawn, and one that
    is dropped because of what it turned out to be spoils the law of those that are kept: decide
    whether to draft on before drawing. Draw with `random_uniform(seed, position, "draft")`,
    position being the draft's own, or with numbers of your own that the engine does not use.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    probs: Any = None
    vocab_ids: Any = None
    replacement: bool = False
