"""How drafters on a step's stream use slots: they write drafts, and read tokens and hidden rows.

A slot whose layout has the method "proposed" drafts what an operation has written there before
``draft_step``. In the order of a step:

    recent_tokens, a network, propose_drafts -> draft_step -> ... -> commit_step, keep_hidden
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec_ext import _core
from specdec_ext.ops._where import stream_of

if TYPE_CHECKING:
    from specdec_ext._core import SlotLayout

Tensor = Any  # torch's, or an array on the host


def propose_drafts(
    layout: SlotLayout,
    slots: Tensor,
    slot_ids: Tensor,
    tokens: Tensor,
    parents: Tensor | None = None,
    *,
    survival: Tensor | None = None,
    counts: Tensor | None = None,
    vocab_size: int,
    backend: str | None = None,
    status: Tensor | None = None,
) -> None:
    """Put drafts of each request's next tokens into its slot, for the ``draft_step`` that follows.

    Shapes   slots [num_slots, slot_bytes] uint8; slot_ids [B] int32, -1: padding; tokens [B, n]
             int32, n <= 127; parents [B, n] int32, index of an earlier draft, -1: the golden token;
             None: chains; survival [B, n] float32, the drafter's estimate of the probability that a
             draft and all drafts above it are accepted; None or a number outside of 0..1: unknown;
             counts [B] int32, None: n.
    Drafts   the first invalid entry ends a request's drafts: a token outside of 0..vocab_size - 1,
             or a parent that does not come before it. A token of -1 is padding; any other invalid
             entry sets flag 4 in ``status``. Put the most valuable drafts first: a step takes the
             first ones that it has room for.
    Writes   the slots, except those that have ended, whose prompt is not read yet, or that draft in
             another way.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.propose_drafts(
        layout,
        slots,
        slot_ids,
        tokens,
        parents,
        survival=survival,
        counts=counts,
        vocab_size=vocab_size,
        backend=backend,
        stream=stream_of(slots),
        status=status,
    )


def recent_tokens(
    layout: SlotLayout,
    slots: Tensor,
    slot_ids: Tensor,
    *,
    tokens: Tensor,
    lens: Tensor,
    room: Tensor | None = None,
    max_drafts: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Read the last tokens of each request that wants drafts, the golden token last.

    Shapes   slots, slot_ids as in ``propose_drafts``; max_drafts [B] int32, the step's limits; a
             request with limit 0 wants no drafts; None: all want some.
    Writes   tokens [B, n] int32; lens [B] int32, length of the whole history; room [B] int32, the
             deepest place of a draft: the tokens by which the text may still grow, less one. It is
             0 for a request that wants no drafts (ended, in its prompt, at its last token, or
             drafting in another way) or has fewer than n tokens.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.recent_tokens(
        layout,
        slots,
        slot_ids,
        tokens=tokens,
        lens=lens,
        room=room,
        max_drafts=max_drafts,
        backend=backend,
        stream=stream_of(slots),
    )


def keep_hidden(
    layout: SlotLayout,
    slots: Tensor,
    slot_ids: Tensor,
    cu_logits: Tensor,
    *,
    results: Tensor,
    path: Tensor,
    path_len: Tensor,
    hidden: Tensor,
    kept: Tensor,
    backend: str | None = None,
) -> None:
    """Keep the hidden state that each request's last token was chosen from, after ``commit_step``.

    Shapes   slots .. path_len as ``commit_step`` had and wrote them; hidden [L, hidden_size]
             float32|float16|bfloat16, one row for each choice of the step.
    Writes   kept [num_slots, hidden_size] of the same dtype: the rows of slots that got tokens and
             continue.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.keep_hidden(
        layout,
        slots,
        slot_ids,
        cu_logits,
        results=results,
        path=path,
        path_len=path_len,
        hidden=hidden,
        kept=kept,
        backend=backend,
        stream=stream_of(slots),
    )
