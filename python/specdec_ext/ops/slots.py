"""What a step does before and after the model, on slots that hold the requests' state.

A slot is a tensor with one request's decoding state: history, limits, stop rules, n-gram pool or
index, and the draft tree of the step in flight (cpp/algo/slot.h). The host writes the start of a
slot when a request enters (``SlotLayout.request_bytes``) and reads results. It need not wait for
one step before it enqueues the next:

    draft_step -> build_step -> model -> argmax -> commit_step -> compact_kv

For requests that sample, ``accept_step`` stands in place of ``argmax``.
A request that has ended is frozen: it drafts no rows and delivers nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_ext import _core
from specdec_ext._core import SlotLayout
from specdec_ext.ops._where import MAX_STEP_TOKENS, stream_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from specdec_ext.ops.accept import AcceptResults

FINISH_REASONS = (None, "stop", "length", "error")


@dataclass(frozen=True)
class SlotResult:
    """What one step delivered to one request.

    tokens         in order; the last one may be an end or stop token
    num_drafts     number of drafts that were verified
    num_accepted   how many of the tokens were accepted drafts
    finish_reason  "stop", "length", "error" (a row of scores held a NaN or allowed no token), or
                   None: the request continues
    stop_reason    the stop id (not the model's end token) that ended it, or None
    """

    tokens: list[int]
    num_drafts: int
    num_accepted: int
    finish_reason: str | None
    stop_reason: int | None


def make_slots(layout: SlotLayout, num_slots: int, device: str | torch.device = "cpu") -> Tensor:
    """[num_slots, slot_bytes] uint8 of empty slots; a slot without a request has no rows."""
    import torch

    return torch.zeros(num_slots, layout.slot_bytes, dtype=torch.uint8, device=device)


def enter_slot(slots: Tensor, slot_id: int, request: bytes) -> None:
    """Put a request (``SlotLayout.request_bytes``) into a slot, on the current stream.

    The copy waits, since it is not from pinned memory. A caller that must not wait keeps a pinned
    buffer and copies from it.
    """
    import torch

    data = torch.frombuffer(bytearray(request), dtype=torch.uint8)
    slots[slot_id, : data.numel()].copy_(data)


def draft_step(
    layout: SlotLayout,
    slots: Tensor,
    slot_ids: Tensor,
    *,
    tokens: Tensor,
    parents: Tensor,
    cu_rows: Tensor,
    kv_len: Tensor,
    max_drafts: Tensor | None = None,
    window_rows: Tensor | None = None,
    guesses: Tensor | None = None,
    backend: str | None = None,
    status: Tensor | None = None,
) -> None:
    """Draft for every request and pack the rows of the step.

    Shapes   slots [num_slots, slot_bytes] uint8; slot_ids [B] int32, -1: padding; max_drafts [B]
             int32, None: as many as each slot allows; window_rows, guesses [B] int32, for
             lookahead: the sizes of its two branches in this step, cut to the request's triple.
    Writes   tokens, parents [R] int32 (0 and -1 after the last request); cu_rows [B + 1] int32;
             kv_len [B] int32; the slots' trees. A request whose rows do not fit into R gets none
             and flag 8 in ``status``.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.draft_step(
        layout,
        slots,
        slot_ids,
        tokens=tokens,
        parents=parents,
        cu_rows=cu_rows,
        kv_len=kv_len,
        max_drafts=max_drafts,
        window_rows=window_rows,
        guesses=guesses,
        backend=backend,
        stream=stream_of(slots),
        status=status,
    )


def commit_step(
    layout: SlotLayout,
    slots: Tensor,
    slot_ids: Tensor,
    cu_logits: Tensor,
    sampled: Tensor,
    *,
    results: Tensor,
    path: Tensor,
    path_len: Tensor,
    accepted: AcceptResults | None = None,
    backend: str | None = None,
    status: Tensor | None = None,
) -> None:
    """Accept along every request's tree, apply its stop rules, and advance history and drafter.

    Shapes   cu_logits [B + 1] int32: the choices of request b are
             sampled[cu_logits[b]:cu_logits[b + 1]], one for each node of its tree, or one for the
             last row of its prompt, or none to leave it unchanged; sampled [L] int32, -1: the
             row's scores hold a NaN; accepted: the results of ``accept_step`` for these requests,
             then ``sampled`` must be ``accepted.sampled``. None: greedy acceptance of ``sampled``.
    Writes   results [B, result_words] int32 (``read_results``); path [B, 128] and path_len [B]
             int32 for ``compact_kv``; the slots. A request is left unchanged, with a flag in
             ``status``, if the number of choices differs from the number of nodes (8) or the
             accepted path is not in its tree (4).
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.commit_step(
        layout,
        slots,
        slot_ids,
        cu_logits,
        sampled,
        results=results,
        path=path,
        path_len=path_len,
        accepted_path=None if accepted is None else accepted.path,
        accepted_path_len=None if accepted is None else accepted.path_len,
        emitted=None if accepted is None else accepted.emitted,
        num_emitted=None if accepted is None else accepted.num_emitted,
        backend=backend,
        stream=stream_of(slots),
        status=status,
    )


def make_results(
    layout: SlotLayout, num_requests: int, device: str | torch.device = "cpu"
) -> tuple[Tensor, ...]:
    """(results, path, path_len) for ``commit_step``, zeroed."""
    import torch

    return (
        torch.zeros(num_requests, layout.result_words, dtype=torch.int32, device=device),
        torch.zeros(num_requests, MAX_STEP_TOKENS, dtype=torch.int32, device=device),
        torch.zeros(num_requests, dtype=torch.int32, device=device),
    )


def read_results(results: Tensor) -> list[SlotResult]:
    """The rows of ``commit_step``'s results. A tensor on a device is copied, so this call waits."""
    rows: Sequence[list[int]] = results.tolist()
    return [
        SlotResult(
            tokens=row[6 : 6 + row[0]],
            num_drafts=row[1],
            num_accepted=row[2],
            finish_reason=FINISH_REASONS[row[3]],
            stop_reason=row[4] if row[4] >= 0 else None,
        )
        for row in rows
    ]
