"""Medusa on a step's stream: heads on kept hidden states, trees of their guesses into the slots.

What each request's tree looks like lies in tables, one row a slot, written when it takes the slot.
On a device draft() is the heads' products, a choice of the best, and look-ups in these tables.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import ops
from ..drafter_config.medusa import MedusaDecodingConfig
from ..drafter_config.medusa_choices import MAX_TOP_K
from ..models.place import CPU, Place
from .device_heads import DeviceHeads
from .medusa import open_heads
from .packed_heads import PackedHeads
from .step_drafter import DraftInputs
from .tree_budget import TreeLayout, likeliest_first, tree_layout

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["StepMedusa"]


class StepMedusa:
    """See StepDrafter. `config` is the given one with the heads that the file really has.

    A step takes as many of the first nodes as it has room for. Those of an adaptive request are in
    the order of the acceptance that the heads' trainer has measured; of any other in their own.
    """

    name = "medusa"
    needs_hidden = True

    def __init__(
        self,
        config: MedusaDecodingConfig,
        model: Any,
        *,
        max_requests: int,
        allow_pickle: bool = False,
    ) -> None:
        self.config, self._heads, self._rates = open_heads(config, model, allow_pickle=allow_pickle)
        self._place: Place = getattr(model, "place", CPU)
        self._side: _OnDevice | _OnHost
        if isinstance(self._heads, DeviceHeads):
            self._side = _OnDevice(self._heads, model, max_requests, self.config.max_draft_len)
        else:
            self._side = _OnHost(self._heads, max_requests, model.vocab_size)

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """See StepDrafter. The options: "medusa_choices", the request's tree, and "adaptive"."""
        self._side.enter(slot, self._tree(options) if options else None)

    def draft(self, inputs: DraftInputs) -> None:
        """See StepDrafter."""
        assert inputs.hidden is not None  # needs_hidden
        self._side.draft(inputs, inputs.hidden)

    def scratch_bytes(self, max_requests: int) -> int:
        """Device memory that a step may take for a while beside weights and buffers: to choose the
        best guesses."""
        if isinstance(self._heads, PackedHeads):
            return 0
        return self._heads.scratch_bytes(max_requests) // 2  # the scores have a buffer

    def stats(self) -> Mapping[str, Any]:
        """See StepDrafter; on the CPU also what MedusaDrafter counts of the trees."""
        return {
            "memory_bytes": self._heads.weight_bytes,
            "device": self._place.name,
            "num_medusa_heads": self._heads.num_heads,
            **self._side.stats(),
        }

    def _tree(self, options: Mapping[str, Any]) -> TreeLayout:
        choices = options["medusa_choices"]
        if options.get("adaptive", True):
            choices = likeliest_first(choices, self._rates)
        return tree_layout(choices)


class _OnHost:
    """On the CPU a step runs when it is enqueued: heads are asked for the requests that draft."""

    def __init__(self, heads: PackedHeads, max_requests: int, vocab_size: int) -> None:
        self._heads = heads
        self._vocab_size = vocab_size
        self._trees: list[TreeLayout | None] = [None] * max_requests
        self._num_nodes = self._num_proposals = self._num_idle = 0
        self._seconds = 0.0

    def enter(self, slot: int, tree: TreeLayout | None) -> None:
        self._trees[slot] = tree

    def draft(self, inputs: DraftInputs, hidden: Tensor) -> None:
        chosen = self._choose(inputs)
        if not chosen:
            return
        begin = time.perf_counter()
        # Heads and guesses that the nodes of these requests need, no more.
        num_heads = max(int(tree.heads[:count].max()) + 1 for _, tree, count in chosen)
        top_k = max(int(tree.ranks[:count].max()) + 1 for _, tree, count in chosen)
        index = inputs.slot_ids[[b for b, _, _ in chosen]]
        ids = self._heads.top(hidden.index_select(0, index), num_heads, top_k).numpy()
        shape = (inputs.num_requests, max(count for _, _, count in chosen))
        tokens = torch.full(shape, -1, dtype=torch.int32)
        parents = torch.full(shape, -1, dtype=torch.int32)
        to_tokens, to_parents = tokens.numpy(), parents.numpy()
        for i, (b, tree, count) in enumerate(chosen):
            to_tokens[b, :count] = ids[tree.heads[:count], i, tree.ranks[:count]]
            to_parents[b, :count] = tree.parents[:count]
            self._num_nodes += count
        self._num_proposals += len(chosen)
        ops.bring_drafts(
            inputs.layout,
            inputs.slots,
            inputs.slot_ids,
            tokens,
            parents,
            vocab_size=self._vocab_size,
            status=inputs.status,
        )
        self._seconds += time.perf_counter() - begin

    def stats(self) -> dict[str, Any]:
        return {
            "head_seconds": self._seconds,
            "num_proposals": self._num_proposals,
            "num_idle": self._num_idle,
            "mean_nodes": self._num_nodes / max(self._num_proposals, 1),
        }

    def _choose(self, inputs: DraftInputs) -> list[tuple[int, TreeLayout, int]]:
        """Of the requests that may draft: the place in the step, the tree, how many nodes of it."""
        count = inputs.num_requests
        golden, lens = (torch.empty(count, 1, dtype=torch.int32) for _ in range(2))
        ops.recent_tokens(
            inputs.layout,
            inputs.slots,
            inputs.slot_ids,
            tokens=golden,
            lens=lens.view(-1),
            max_drafts=inputs.max_drafts,
        )
        chosen = []
        for b, (slot, most, length) in enumerate(
            zip(
                inputs.slot_ids.tolist(),
                inputs.max_drafts.tolist(),
                lens.view(-1).tolist(),
                strict=True,
            )
        ):
            tree = self._trees[slot] if slot >= 0 else None
            if tree is not None and length > 0:
                chosen.append((b, tree, min(most, tree.size)))
            else:
                self._num_idle += slot >= 0
        return chosen


class _OnDevice:
    """Everything has a place of fixed address, and draft() only enqueues.

    heads       have buffers for steps of all slots
    max_nodes   of any request's tree
    """

    def __init__(self, heads: DeviceHeads, model: Any, max_requests: int, max_nodes: int) -> None:
        place: Place = model.place
        self._heads = heads
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

        # Of each node head * top_k + rank; its parent, and behind those the number of nodes. Twice:
        # for steps, and where the host writes. That is safe without a wait: a slot is taken anew
        # only after the last step that named it was read, so the copy in front of it is long done.
        self._nodes, self._staged_nodes = table(max_nodes, torch.int64)
        self._parents, self._staged_parents = table(max_nodes + 1, torch.int32)

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

    def enter(self, slot: int, tree: TreeLayout | None) -> None:
        nodes, parents = self._staged_nodes[slot].numpy(), self._staged_parents[slot].numpy()
        size = 0 if tree is None else tree.size
        parents[-1] = size
        if tree is not None:
            nodes[:size] = tree.heads * self._top_k + tree.ranks
            parents[:size] = tree.parents
        self._nodes[slot].copy_(self._staged_nodes[slot], non_blocking=True)
        self._parents[slot].copy_(self._staged_parents[slot], non_blocking=True)

    def draft(self, inputs: DraftInputs, hidden: Tensor) -> None:
        heads, count = self._heads, inputs.num_requests
        width = min(inputs.max_width, self._width)
        # The first nodes reach no deeper than their number: parents come first. So do those of a
        # slot's last tree that lie behind a smaller one, and nobody reads what they are.
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
        ops.bring_drafts(
            inputs.layout,
            inputs.slots,
            inputs.slot_ids,
            tokens,
            parents,
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
