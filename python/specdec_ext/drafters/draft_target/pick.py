"""How the drafts of a request that samples are chosen from a draft model's scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["pick_of"]


def pick_of(options: Mapping[str, Any]) -> str:
    """By the options of request/speculation.py; empty: no drafts are wanted.

    "best"     the likeliest token
    "coupled"  the draw at the number that the target will use at the draft's position, so the
               closer the two models, the more often both pick the same token
    "own"      a draw from the request's law applied to the draft model's scores, which acceptance
               by probabilities is told
    """
    acceptance = options.get("acceptance")
    if acceptance == "exact_match":
        return "coupled"
    by_probs = acceptance in ("rejection", "threshold")
    return "own" if by_probs and options["use_draft_logits"] else "best"
