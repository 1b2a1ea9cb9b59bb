"""What a step on a stream does for requests that the host decides (docs/overlap.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..._core import MAX_STEP_TOKENS
from ...models.device_moves import KvMoves

if TYPE_CHECKING:
    from torch import Tensor

    from .buffers import StepBuffers, StepTensors
    from .step_sizes import StepSizes

__all__ = ["HostSide"]


class HostSide:
    """Operations on the stream: before a step, what the host has decided since the last one; after
    the model, what it will decide from."""

    def __init__(
        self,
        buffers: StepBuffers,
        pools: Sequence[tuple[Tensor, Tensor, int]],
        backend: str | None,
    ) -> None:
        """pools  (K, V) pages, and which of a step's tables names them"""
        self._buffers, self._pools, self._backend = buffers, tuple(pools), backend
        self._left: dict[int, Tensor] = {}  # by slot, hidden states of its last step's rows

    def move_kv(self, tensors: StepTensors) -> KvMoves:
        """Bring K/V that the host has accepted to its place; returns what was moved."""
        b, layout, step = self._buffers, self._buffers.staging, tensors.step
        requests = len(step.kv_len)
        path = b.staged_part(layout.move_path, requests * MAX_STEP_TOKENS)
        moves = KvMoves(
            step.tables,
            b.staged_part(layout.move_kv_len, requests),
            b.staged_part(layout.move_cu_rows, requests + 1),
            path.view(requests, MAX_STEP_TOKENS),
            b.staged_part(layout.move_path_len, requests),
            requests * MAX_STEP_TOKENS,
            step.max_kv_len,
        )
        moves.run(self._pools, self._backend, tensors.status)
        return moves

    def show(
        self, g: StepSizes, tensors: StepTensors, scores: Tensor, hidden: Tensor | None
    ) -> None:
        """Collect the rows of scores that the host reads.

        g       the step's StepSizes
        hidden  [rows of scores, H] what a drafter may go on from; None: nothing is kept
        """
        to, at = self._buffers.host_scores, 0
        vocab = to.shape[1]
        for choice in g.host_choices:
            rows = slice(choice.first, choice.first + choice.count)
            to[at : at + choice.count].copy_(scores[rows, :vocab])
            at += choice.count
            if hidden is not None and choice.slot >= 0:
                self._leave(choice.slot, hidden[rows])
        for tree in g.host_trees:
            first = tensors.cu_logits[g.prompts + tree.decode]
            index = torch.arange(tree.rows, device=scores.device).add_(first)
            index.clamp_(max=len(scores) - 1)  # it may have drafted less
            to[at : at + tree.rows].copy_(scores.index_select(0, index)[:, :vocab])
            at += tree.rows
            if hidden is not None:
                self._leave(tree.slot, hidden.index_select(0, index))

    def take_kept(self, rows: tuple[tuple[int, int], ...], kept: Tensor) -> None:
        """kept[slot] becomes the row of the slot's last step that its last token was chosen after.

        rows  (slot, row)
        """
        for slot, row in rows:
            kept[slot].copy_(self._left[slot][row])

    def _leave(self, slot: int, hidden: Tensor) -> None:
        if slot not in self._left:
            self._left[slot] = hidden.new_zeros(MAX_STEP_TOKENS, hidden.shape[1])
        self._left[slot][: len(hidden)].copy_(hidden)
