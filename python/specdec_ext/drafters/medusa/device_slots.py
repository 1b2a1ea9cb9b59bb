"""Medusa on a device's stream: heads, a choice of the best, and look-ups in tables of the trees.

What each request's tree looks like lies in tables, one row a slot, written when it takes the slot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ... import _core, ops
from ...config.medusa_choices import MAX_TOP_K
from ...models.place import Place
from ..slot_drafter import DraftInputs
from .device_heads import DeviceHeads
from .open_heads import Rates

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MedusaOnDevice"]


class MedusaOnDevice:
    """Everything has a place of fixed address, and draft() only enqueues.

    heads       have buffers for steps of all slots
    max_nodes   of any request's tree
    """

    def __init__(
        self, heads: DeviceHeads, rates: Rates, model: Any, max_requests: int, max_nodes: int
    ) -> None:
        place: Place = model.place
        self._heads, self._rates = heads, rates
        self._backend = place.backend
        self._vocab_size: int = model.vocab_size
        self._width = max_nodes
        # A request's own tree may ask for any guess: the step is launched without looking.
        self._top_k = min(MAX_TOP_K, heads.num_scores)
        heads.reserve(max_requests, self._top_k)
        pinned = place.device.type == "cuda"

        self._memory: list[Tensor] = []

        def table(columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            shape = (max_requests, columns)
            self._memory.append(torch.zeros(shape, dtype=dtype, device=place.device))
            return self._memory[-1], torch.zeros(shape, dtype=dtype, pin_memory=pinned)

        # For each node head * top_k + rank; its parent, and after those the number of nodes. Both
        # twice: for steps, and where the host writes. That is safe without a wait: a slot is taken
        # anew only after the last step that named it was read, so the copy in front is long done.
        self._nodes, self._staged_nodes = table(max_nodes, torch.int64)
        self._parents, self._staged_parents = table(max_nodes + 1, torch.int32)
        self._worth, self._staged_worth = table(max_nodes, torch.float32)

        def buffer(size: int, dtype: torch.dtype) -> Tensor:
            shape = (max_requests * size,)
            self._memory.append(torch.empty(shape, dtype=dtype, device=place.device))
            return self._memory[-1]

        self._rows = buffer(1, torch.int32)
        self._counts = buffer(1, torch.int32)
        self._states = buffer(heads.hidden_size, model.kv_dtype)
        self._guesses = buffer(heads.num_heads * self._top_k, torch.int32)
        self._picked = buffer(max_nodes, torch.int64)
        self._tokens = buffer(max_nodes, torch.int32)
        self._tree = buffer(max_nodes, torch.int32)
        self._survival = buffer(max_nodes, torch.float32)

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        nodes, parents = self._staged_nodes[slot].numpy(), self._staged_parents[slot].numpy()
        parents[-1] = 0
        if options:
            heads, ranks, above, worth = _core.guess_tree(
                options["medusa_choices"], self._rates, options.get("adaptive", True)
            )
            parents[-1] = size = len(heads)
            nodes[:size] = heads * self._top_k + ranks
            parents[:size] = above
            self._staged_worth[slot].numpy()[:size] = worth
        for to, staged in (
            (self._nodes, self._staged_nodes),
            (self._parents, self._staged_parents),
            (self._worth, self._staged_worth),
        ):
            to[slot].copy_(staged[slot], non_blocking=True)

    def draft(self, inputs: DraftInputs) -> None:
        heads, count, hidden = self._heads, inputs.num_requests, inputs.hidden
        assert hidden is not None  # MedusaDrafter.needs_hidden
        width = min(inputs.max_width, self._width)
        # The first nodes reach no deeper than their number: parents come first. So do those of a
        # slot's last tree that lie after a smaller one, and nobody reads what they are.
        num_heads = min(heads.num_heads, width)
        rows = self._rows[:count]
        torch.clamp(inputs.slot_ids, min=0, out=rows)  # padding looks up what nobody reads
        states = self._buffer(self._states, count, hidden.shape[1])
        torch.index_select(hidden, 0, rows, out=states)
        best = heads.best(states, num_heads, self._top_k)
        guesses = self._buffer(self._guesses, count, num_heads, self._top_k)
        guesses.copy_(best.transpose(0, 1))
        picked = self._buffer(self._picked, count, width)
        torch.index_select(self._nodes[:, :width], 0, rows, out=picked)
        tokens = self._buffer(self._tokens, count, width)
        torch.gather(guesses.flatten(1), 1, picked, out=tokens)
        parents, counts = self._buffer(self._tree, count, width), self._counts[:count]
        torch.index_select(self._parents[:, :width], 0, rows, out=parents)
        torch.index_select(self._parents[:, -1], 0, rows, out=counts)
        survival = self._buffer(self._survival, count, width)
        torch.index_select(self._worth[:, :width], 0, rows, out=survival)
        ops.propose_drafts(
            inputs.layout,
            inputs.slots,
            inputs.slot_ids,
            tokens,
            parents,
            survival=survival,
            counts=counts,
            vocab_size=self._vocab_size,
            backend=self._backend,
            status=inputs.status,
        )

    def stats(self) -> dict[str, Any]:
        own = sum(t.numel() * t.element_size() for t in self._memory)
        return {"buffer_bytes": self._heads.buffer_bytes + own}

    @staticmethod
    def _buffer(memory: Tensor, *shape: int) -> Tensor:
        return memory[: math.prod(shape)].view(shape)
