"""Medusa in a step: heads on kept hidden states, trees of their guesses into the slots."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import ops
from ...config.medusa import MedusaDecodingConfig
from ...models.place import CPU, Place
from ..slot_drafter import DraftInputs
from .guess_rates import Floats, GuessRates, likeliest_first, tree_layout
from .open_heads import open_heads
from .packed_heads import PackedHeads

if TYPE_CHECKING:
    from .device_slots import MedusaOnDevice

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
        self._side: MedusaOnDevice | _OnHost
        nodes = self.config.max_draft_len
        if isinstance(self._heads, PackedHeads):
            self._side = _OnHost(self._heads, self._rates, max_requests, nodes, model.vocab_size)
        else:
            from .device_slots import MedusaOnDevice

            self._side = MedusaOnDevice(self._heads, self._rates, model, max_requests, nodes)

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """See SlotDrafter. The options: "medusa_choices", the request's tree, and "adaptive"."""
        self._side.enter(slot, options)

    def draft(self, inputs: DraftInputs) -> None:
        """See SlotDrafter."""
        if isinstance(self._heads, PackedHeads):
            inputs = inputs.on_host()
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

        def make(*shape: int, dtype: type = np.int32) -> np.ndarray:
            return np.zeros((max_requests, *shape), dtype=dtype)

        self._golden, self._lens, self._counts = make(1), make(), make()
        self._tokens, self._parents = make(max_nodes), make(max_nodes)
        self._survival = make(max_nodes, dtype=np.float32)
        # Everything that was seen, for the tuner.
        self._measured = GuessRates(np.zeros_like(rates), 0.0, memory=float("inf"))
        self._num_nodes = self._num_proposals = self._num_idle = self._num_steps = 0
        self._seconds = 0.0

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        self._trees[slot] = _HostTree(options, self._rates) if options else None

    def draft(self, inputs: DraftInputs, hidden: np.ndarray) -> None:
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
        ids = self._heads.top(hidden[index], num_heads, max(top_k, self._top_k))
        self._counts[:requests] = 0
        for i, (b, tree, count, length) in enumerate(chosen):
            layout = tree.layout
            self._counts[b] = count
            self._tokens[b, :count] = ids[layout.heads[:count], i, layout.ranks[:count]]
            self._parents[b, :count] = layout.parents[:count]
            self._survival[b, :count] = tree.worth[:count]
            tree.pending.append(_Guesses(length, ids[:, i].tolist()))
            self._num_nodes += count
        self._num_proposals += len(chosen)
        self._num_steps += 1
        ops.propose_drafts(
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
        text = inputs.slots[slot].view(np.int32)[first + start : first + length].tolist()
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
