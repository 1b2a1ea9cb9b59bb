"""What a drafter sees of a request, what it answers, and the protocol it follows.

A drafter never sees K/V pages of the target, other requests' texts or the plan. Whatever it
proposes, the output is the target's own: a drafter only decides how many forward passes it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..config.engine import MAX_DRAFT_LEN

if TYPE_CHECKING:
    import torch

__all__ = ["DraftRequest", "Drafter", "Proposal"]


@dataclass
class DraftRequest:
    """One decoding request in front of its next step.

    tokens         prompt and output so far; the last one is the golden token: decided, and not yet
                   read by the target. Not to be changed.
    prompt_len     how many of them are the prompt's
    max_drafts     nodes that its next step can hold
    step_limit     nodes that draft_len_schedule allows in its next step
    max_depth      deeper drafts would pass the request's length limit
    hidden         float32 [hidden_size], the head's input of the row that decided the golden token;
                   None unless the drafter `needs_hidden`
    options        what the request asked of this method (request/speculation.py)
    temperature, top_k, top_p, min_p, seed
                   the request's sampling law; temperature 0: greedy
    wants_probs    its acceptance uses Proposal.probs; else they are not looked at
    cache_salt     who may share K/V with it
    num_drafted    drafts of its last step, and how many of them were accepted
    num_accepted
    num_known      tokens that were taken as a whole, and the number of the output that brought the
    sequence       last of them (an interrupt may come between)
    state          the drafter's own; dropped with the request
    """

    request_id: int
    tokens: list[int]
    prompt_len: int
    max_len: int
    draft_limit: int
    options: Mapping[str, Any]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    wants_probs: bool = False
    cache_salt: str = ""
    step_limit: int = MAX_DRAFT_LEN
    hidden: torch.Tensor | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    num_known: int = 0
    sequence: int = 0
    state: Any = field(default=None, repr=False)

    @property
    def max_depth(self) -> int:
        return max(0, self.max_len - len(self.tokens) - 1)

    @property
    def max_drafts(self) -> int:
        return min(self.draft_limit, self.step_limit) if self.max_depth > 0 else 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


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
    whether to draft on before drawing. Draw with `_core.random_uniform(seed, position, "draft")`,
    position being the draft's own, or with numbers of your own that the engine does not use.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    probs: Any = None
    vocab_ids: Any = None
    replacement: bool = False


class Drafter(Protocol):
    """One object per engine. Calls come from the stepping thread, one at a time.

    hidden_device  where DraftRequest.hidden is to lie, if the drafter has this attribute: the host
                   (None) or the target's device
    scratch_bytes  (max_requests): device memory that a step may take, if the drafter has this
    """

    name: str
    needs_hidden: bool

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal | None]:
        """Drafts for each request's next step, None for none; in the order of `requests`.

        An exception costs the step its drafts, nothing else.
        """
        ...

    def end(self, request: DraftRequest) -> None:
        """The request has ended, whatever way; free what `state` holds."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Numbers for get_metrics(): "memory_bytes" and what the method counts."""
        ...
