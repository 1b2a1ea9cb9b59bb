"""Beam search on a step's stream: depths of all requests at once, then draft trees.

per depth: a network's scores, torch.topk, grow_beams, the states of the rows that continue
merge_beams -> propose_drafts
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec_ext import _core
from specdec_ext.ops._where import stream_of

if TYPE_CHECKING:
    from torch import Tensor


def grow_beams(
    scores: Tensor,
    columns: Tensor,
    *,
    tokens: Tensor,
    parents: Tensor,
    log_probs: Tensor,
    reached: Tensor,
    depth: int,
    num_scores: int,
    num_beams: Tensor,
    lengths: Tensor,
    next_rows: Tensor,
    next_tokens: Tensor,
    temperatures: Tensor | None = None,
    token_ids: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Extend each request's beams by one depth: keep those with the largest log-probability.

    Shapes   scores [rows, k] float32, columns [rows, k] int64: the k <= 64 best scores of each row,
             best first, as torch.topk gives them; rows: D at depth 0, else D * width. tokens,
             parents [D, length, width] int32, log_probs [D, length, width] float32, reached [D]
             int32: the beams so far. num_beams, lengths [D] int32: the beams and depths that each
             request asked for; temperatures [D] float32: the divisor of its scores, None: 1.
             token_ids [num_scores] int32: the token of each column, None: the column.
    Chosen   the log-softmax over the k scores of a row is added to its beam's log-probability. On
             ties the earlier beam wins, then its better score. A score of -infinity is not a
             candidate, nor is any score from the first one on that is out of order or has no
             column. A row with NaN or +infinity has no candidates.
    Writes   places [b, depth, j] for every j, best first: parents is the place in the depth before;
             where there is no beam, the token is -1 and the log-probability -infinity. reached [b]
             = depth + 1, unless the request has its full length or no candidates; then it keeps its
             beams. next_rows, next_tokens [D, width] int32: the row that each beam extends and its
             token; where there is no beam, the request's first row and token 0.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.grow_beams(
        scores,
        columns,
        tokens=tokens,
        parents=parents,
        log_probs=log_probs,
        reached=reached,
        depth=depth,
        num_scores=num_scores,
        num_beams=num_beams,
        lengths=lengths,
        next_rows=next_rows,
        next_tokens=next_tokens,
        temperatures=temperatures,
        token_ids=token_ids,
        backend=backend,
        stream=stream_of(scores),
    )


def merge_beams(
    tokens: Tensor,
    parents: Tensor,
    log_probs: Tensor,
    reached: Tensor,
    *,
    draft_tokens: Tensor,
    draft_parents: Tensor,
    counts: Tensor,
    draft_nodes: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Merge each request's beams into a draft tree in which a shared prefix is one node.

    Shapes   tokens, parents, log_probs, reached as ``grow_beams`` wrote them.
    Writes   draft_tokens, draft_parents [D, length * width] int32 and counts [D] int32, as
             ``propose_drafts`` takes them: the likeliest drafts first, -1 after the last.
             draft_nodes [D, length * width] int32: for each of the counts [b] drafts its node, as
             depth * width + place; None: not wanted.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.merge_step_beams(
        tokens,
        parents,
        log_probs,
        reached,
        draft_tokens=draft_tokens,
        draft_parents=draft_parents,
        counts=counts,
        draft_nodes=draft_nodes,
        backend=backend,
        stream=stream_of(tokens),
    )
