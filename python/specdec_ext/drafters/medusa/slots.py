"""Medusa on a step's stream: heads on kept hidden states, trees of their guesses into the slots.

What each request's tree looks like lies in tables, one row a slot, written when it takes the slot.
On a device draft() is the heads' products, a choice of the best, and look-ups in these tables.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ... import ops
from ...config.medusa import MedusaDecodingConfig
from ...config.medusa_choices import MAX_TOP_K
from ...models.place import CPU, Place
from ..slot_drafter import DraftInputs
from .device_heads import DeviceHeads
from .guess_rates import Floats, GuessRates, likeliest_first, tree_layout
from .open_heads import open_heads
from .packed_heads import PackedHeads

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MedusaDrafter"]

_REQUEST_PRIOR = 24.0  # observations' worth of the rates to start from
_ARRANGE_EVERY = 16  # steps of a request: its tree follows what was seen
_SEEN_RANKS = 10  # guesses of a head that are held against the text, where the tree needs fewer


class MedusaDrafter:
    """See SlotDrafter. `config` is the given one with the heads that the file really has.

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
        nodes = self.config.max_draft_len
        if isinstance(self._heads, DeviceHeads):
            self._side = _OnDevice(self._heads, self._rates, model, max_requests, nodes)
        else:
            self._side = _OnHost(self._heads, self._rates, max_requests, nodes, model.vocab_size)

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """See SlotDrafter. The options: "medusa_choices", the request's tree, and "adaptive"."""
        self._side.enter(slot, options)

    def draft(self, inputs: DraftInputs) -> None:
        """See SlotDrafter."""
        assert inputs.hidden is not None  # needs_hidden
        self._side.draft(inputs, inputs.hidden)

    def scratch_bytes(self, max_requests: int) -> int:
        """Device memory that a step may take for a while besides weights and buffers: to choose the
        best guesses."""
        if isinstance(self._heads, PackedHeads):
            return 0
        return self._heads.scratch_bytes(max_requests) // 2  # the scores have a buffer

    def stats(self) -> Mapping[str, Any]:
        """See SlotDrafter; on the CPU also what was seen of guesses and trees. guess_rates[h][r]:
        how often head h's guess of rank r was right."""
        return {
            "memory_bytes": self._heads.weight_bytes,
            "device": self._place.name,
            "num_medusa_heads": self._heads.num_heads,
            **self._side.stats(),
        }

    def measured_rates(self) -> tuple[list[list[float]], list[float]]:
        """On the CPU: (how often each head's guess of each rank was right, over all steps so far
        [heads][ranks], observations of each head)."""
        assert isinstance(self._side, _OnHost)
        return self._side.measured_rates()

    @property
    def head_seconds_per_step(self) -> float:
        """On the CPU: of evaluating the heads."""
        assert isinstance(self._side, _OnHost)
        return self._side.head_seconds_per_step


@dataclass
class _Guesses:
    """What the heads said behind position `start`; head h is about token start + h."""

    start: int
    ids: list[list[int]]  # [heads, top_k]
    next_head: int = 0


class _HostTree:
    """The tree of one request, and what was seen of its guesses. An adaptive one puts the nodes
    first that are likeliest by now, leaning on the rates to start from while it is young."""

    def __init__(self, options: Mapping[str, Any], rates: Floats) -> None:
        self._choices = options["medusa_choices"]
        self._adaptive = options.get("adaptive", True)
        self._steps = 0
        self.rates = GuessRates(rates, _REQUEST_PRIOR)
        self.pending: list[_Guesses] = []
        self.arrange()

    def arrange(self) -> None:
        """Every so many steps."""
        if self._steps % _ARRANGE_EVERY == 0:
            rates = self.rates.rates()
            choices = likeliest_first(self._choices, rates) if self._adaptive else self._choices
            self.layout = tree_layout(choices)
            self.worth = self.layout.worth(rates).astype(np.float32)
        self._steps += 1


class _OnHost:
    """On the CPU a step runs when it is enqueued: heads are asked for the requests that draft."""

    def __init__(
        self, heads: PackedHeads, rates: Floats, max_requests: int, max_nodes: int, vocab_size: int
    ) -> None:
        self._heads, self._rates = heads, rates
        self._vocab_size = vocab_size
        self._top_k = min(_SEEN_RANKS, heads.num_scores)
        self._trees: list[_HostTree | None] = [None] * max_requests

        def make(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(max_requests, *shape, dtype=dtype)

        self._golden, self._lens, self._counts = make(1), make(), make()
        self._tokens, self._parents = make(max_nodes), make(max_nodes)
        self._survival = make(max_nodes, dtype=torch.float32)
        where = (self._counts, self._tokens, self._parents, self._survival)
        self._where = [tensor.numpy() for tensor in where]  # the same memory
        # Everything that was seen, for the tuner.
        self._measured = GuessRates(np.zeros_like(rates), 0.0, memory=float("inf"))
        self._num_nodes = self._num_proposals = self._num_idle = self._num_steps = 0
        self._seconds = 0.0

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        self._trees[slot] = _HostTree(options, self._rates) if options else None

    def draft(self, inputs: DraftInputs, hidden: Tensor) -> None:
        chosen = self._choose(inputs)
        if not chosen:
            return
        begin = time.perf_counter()
        # Heads and guesses that the nodes of these requests need, no more.
        num_heads = max(tree.layout.num_heads[count] for _, tree, count, _ in chosen)
        top_k = max(tree.layout.top_k[count] for _, tree, count, _ in chosen)
        requests = inputs.num_requests
        index = inputs.slot_ids
        if len(chosen) < requests:
            index = index[[b for b, *_ in chosen]]
        states = hidden.index_select(0, index)
        ids = self._heads.top(states, num_heads, max(top_k, self._top_k)).numpy()
        to_counts, to_tokens, to_parents, to_survival = self._where
        to_counts[:requests] = 0
        for i, (b, tree, count, length) in enumerate(chosen):
            layout = tree.layout
            to_counts[b] = count
            to_tokens[b, :count] = ids[layout.heads[:count], i, layout.ranks[:count]]
            to_parents[b, :count] = layout.parents[:count]
            to_survival[b, :count] = tree.worth[:count]
            tree.pending.append(_Guesses(length, ids[:, i].tolist()))
            self._num_nodes += count
        self._num_proposals += len(chosen)
        self._num_steps += 1
        ops.bring_drafts(
            inputs.layout,
            inputs.slots,
            inputs.slot_ids,
            self._tokens[:requests],
            self._parents[:requests],
            survival=self._survival[:requests],
            counts=self._counts[:requests],
            vocab_size=self._vocab_size,
            status=inputs.status,
        )
        self._seconds += time.perf_counter() - begin

    def measured_rates(self) -> tuple[list[list[float]], list[float]]:
        """(rates [heads][ranks] over all steps so far, observations of each head)."""
        return self._measured.rates()[:, : self._top_k].tolist(), self._measured.trials

    @property
    def head_seconds_per_step(self) -> float:
        return self._seconds / max(self._num_steps, 1)

    def stats(self) -> dict[str, Any]:
        rates, _ = self.measured_rates()
        return {
            "head_seconds": self._seconds,
            "num_proposals": self._num_proposals,
            "num_idle": self._num_idle,
            "mean_nodes": self._num_nodes / max(self._num_proposals, 1),
            "guess_rates": [[round(rate, 4) for rate in row] for row in rates],
        }

    def _choose(self, inputs: DraftInputs) -> list[tuple[int, _HostTree, int, int]]:
        """For each request that may draft: its place in the step, its tree, the number of nodes
        and the length of its text."""
        count = inputs.num_requests
        lens = self._lens[:count]
        ops.recent_tokens(
            inputs.layout,
            inputs.slots,
            inputs.slot_ids,
            tokens=self._golden[:count],
            lens=lens,
            max_drafts=inputs.max_drafts,
        )
        chosen = []
        rows = (t.tolist() for t in (inputs.slot_ids, inputs.max_drafts, lens))
        for b, (slot, most, length) in enumerate(zip(*rows, strict=True)):
            tree = self._trees[slot] if slot >= 0 else None
            if tree is None or length == 0:
                self._num_idle += slot >= 0
                continue
            self._learn(tree, inputs, slot, length)
            tree.arrange()
            chosen.append((b, tree, min(most, tree.layout.size), length))
        return chosen

    def _learn(self, tree: _HostTree, inputs: DraftInputs, slot: int, length: int) -> None:
        """Hold earlier guesses against the tokens that are known by now."""
        if not tree.pending or tree.pending[0].start >= length:
            return
        start = tree.pending[0].start
        first = inputs.layout.history_offset // 4
        text = inputs.slots[slot].view(torch.int32)[first + start : first + length].tolist()
        left = []
        for guesses in tree.pending:
            alive = True
            while alive and guesses.start + guesses.next_head < length:
                head = guesses.next_head
                token = text[guesses.start + head - start]
                alive = tree.rates.observe(guesses.ids, head, token)
                self._measured.observe(guesses.ids, head, token)
                guesses.next_head += 1
                alive = alive and guesses.next_head < len(guesses.ids)
            if alive:
                left.append(guesses)
        tree.pending = left


class _OnDevice:
    """Everything has a place of fixed address, and draft() only enqueues.

    heads       have buffers for steps of all slots
    max_nodes   of any request's tree
    """

    def __init__(
        self, heads: DeviceHeads, rates: Floats, model: Any, max_requests: int, max_nodes: int
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

        # For each node head * top_k + rank; its parent, and behind those the number of nodes. Both
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
            choices = options["medusa_choices"]
            if options.get("adaptive", True):
                choices = likeliest_first(choices, self._rates)
            tree = tree_layout(choices)
            parents[-1] = size = tree.size
            nodes[:size] = tree.heads * self._top_k + tree.ranks
            parents[:size] = tree.parents
            self._staged_worth[slot].numpy()[:size] = tree.worth(self._rates)
        for to, staged in (
            (self._nodes, self._staged_nodes),
            (self._parents, self._staged_parents),
            (self._worth, self._staged_worth),
        ):
            to[slot].copy_(staged[slot], non_blocking=True)

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
        survival = self._buffer(self._survival, count, width)
        torch.index_select(self._worth[:, :width], 0, rows, out=survival)
        ops.bring_drafts(
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
