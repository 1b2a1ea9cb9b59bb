"""The Medusa drafter: heads on the accepted row's hidden state, a static tree of their guesses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...config.medusa import MedusaDecodingConfig
from ...config.medusa_choices import MAX_TOP_K
from ...log import logger
from ...models.place import CPU
from ..base import DraftRequest, Proposal
from ..step_cost import StepCost, mean_context
from ..tree_budget import Floats, GuessRates, Ints, TreeLayout, choose_nodes, tree_layout
from .checkpoint import load_heads
from .device_heads import DeviceHeads
from .packed_heads import PackedHeads

__all__ = ["MedusaDrafter", "open_heads"]

# Rates that a new engine starts from where the heads bring none: right often enough to be tried.
_FIRST_RATE, _RANK_DECAY, _HEAD_DECAY = 0.5, 0.4, 0.85
_ENGINE_PRIOR, _REQUEST_PRIOR = 16.0, 24.0  # observations' worth
# While drafting does not pay, or not all heads are used, they are all asked once in so many steps.
_PROBE_EVERY = 16


@dataclass
class _Guesses:
    """What the heads said behind position `start`; head h is about token start + h."""

    start: int
    ids: list[list[int]]  # [heads, top_k]
    next_head: int = 0


@dataclass
class _State:
    layout: TreeLayout
    rates: GuessRates
    pending: list[_Guesses] = field(default_factory=list)
    steps: int = 0


def open_heads(
    config: MedusaDecodingConfig, model: Any, *, allow_pickle: bool = False
) -> tuple[MedusaDecodingConfig, PackedHeads | DeviceHeads, Floats]:
    """`config` with the heads that its file really has, they where `model` runs, and the rates
    [heads, MAX_TOP_K] of their guesses to start from.

    Raises ConfigError or ModelError when file, configuration and model do not fit.
    """
    heads = load_heads(config.model, model=model, allow_pickle=allow_pickle)
    known = config.with_heads(heads.config.num_medusa_heads, heads.config.head_rows)
    number = known.num_medusa_heads
    assert number is not None
    dtype = model.kv_dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    make = PackedHeads if getattr(model, "place", CPU).is_cpu else DeviceHeads
    prior = _prior(heads.config.training, number, MAX_TOP_K)
    return known, make(heads, model, num_heads=number, dtype=dtype), prior


class MedusaDrafter:
    """See Drafter. `config` is the given one with the heads that the file really has."""

    name = "medusa"
    needs_hidden = True
    hidden_device: torch.device | None = None

    def __init__(
        self, config: MedusaDecodingConfig, model: Any, *, allow_pickle: bool = False
    ) -> None:
        self.config, self.heads, prior = open_heads(config, model, allow_pickle=allow_pickle)
        if isinstance(self.heads, DeviceHeads):
            self.hidden_device = self.heads.device
        place = getattr(model, "place", CPU)
        self.device: str = place.name
        layout = tree_layout(self.config.medusa_choices)
        self._top_k = min(max(layout.max_top_k, 10), self.heads.num_scores)
        self._cost: StepCost | None = None
        self._head_seconds: dict[int, float] = {}  # by requests of a step
        self._rates = GuessRates(prior, _ENGINE_PRIOR)
        # Everything that was seen, for the tuner.
        self._measured = GuessRates(np.zeros_like(prior), 0.0, memory=float("inf"))
        self._num_states = 0
        self._num_nodes = self._num_proposals = self._num_idle = 0
        self._seconds = 0.0

    def scratch_bytes(self, max_requests: int) -> int:
        """Device memory that a step of `max_requests` requests may take besides the weights."""
        return self.heads.scratch_bytes(max_requests) if isinstance(self.heads, DeviceHeads) else 0

    def set_step_cost(self, cost: StepCost) -> None:
        """Seconds of a forward pass by its rows: from now on the tree is cut to what pays."""
        self._cost = cost

    def measured_rates(self) -> tuple[list[list[float]], list[float]]:
        """(rates [heads][ranks] over all steps so far, observations of each head)."""
        return self._measured.rates()[:, : self._top_k].tolist(), self._measured.trials

    @property
    def head_seconds_per_step(self) -> float:
        """Seconds that evaluating the heads takes, for one request if one was seen alone."""
        return self._head_seconds[min(self._head_seconds)] if self._head_seconds else 0.0

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal | None]:
        """See Drafter."""
        for request in requests:
            if request.state is None:
                request.state = self._start(request)
            self._learn(request)
        chosen, num_heads = self._choose(requests)
        if num_heads == 0:
            self._num_idle += len(requests)
            return [None] * len(requests)
        begin = time.perf_counter()
        layouts = [request.state.layout for request in requests]
        top_k = max(self._top_k, max(layout.max_top_k for layout in layouts))
        hidden = torch.stack([_hidden(request) for request in requests])
        ids = self.heads.top(hidden, num_heads, top_k).numpy()
        seconds = time.perf_counter() - begin
        self._seconds += seconds
        known = self._head_seconds.get(len(requests), seconds)
        self._head_seconds[len(requests)] = min(seconds, known + 0.1 * abs(seconds - known))
        return [
            self._proposal(request, nodes, ids[:, i])
            for i, (request, nodes) in enumerate(zip(requests, chosen, strict=True))
        ]

    def end(self, request: DraftRequest) -> None:
        """See Drafter."""
        if request.state is not None:
            request.state = None
            self._num_states -= 1

    def stats(self) -> Mapping[str, Any]:
        """See Drafter. guess_rates[h][r]: how often head h's guess of rank r was right."""
        return {
            "memory_bytes": self.heads.weight_bytes,
            "device": self.device,
            "num_medusa_heads": self.heads.num_heads,
            "head_seconds": self._seconds,
            "num_states": self._num_states,
            "num_proposals": self._num_proposals,
            "num_idle": self._num_idle,
            "mean_nodes": self._num_nodes / max(self._num_proposals, 1),
            "guess_rates": [
                [round(rate, 4) for rate in row[:10]] for row in self._rates.rates().tolist()
            ],
        }

    def _start(self, request: DraftRequest) -> _State:
        self._num_states += 1
        layout = tree_layout(request.options["medusa_choices"])
        return _State(layout, GuessRates(self._rates.rates(), _REQUEST_PRIOR))

    def _learn(self, request: DraftRequest) -> None:
        """Hold earlier guesses against the tokens that are known by now."""
        state: _State = request.state
        tokens, left = request.tokens, []
        for guesses in state.pending:
            alive = True
            while alive and guesses.start + guesses.next_head < len(tokens):
                head, token = guesses.next_head, tokens[guesses.start + guesses.next_head]
                alive = state.rates.observe(guesses.ids, head, token)
                self._rates.observe(guesses.ids, head, token)
                self._measured.observe(guesses.ids, head, token)
                guesses.next_head += 1
                alive = alive and guesses.next_head < len(guesses.ids)
            if alive:
                left.append(guesses)
        state.pending = left

    def _choose(self, requests: Sequence[DraftRequest]) -> tuple[list[Ints | None], int]:
        """Per request the nodes to verify (None: the whole tree), and the heads to ask."""
        deepest = max(min(r.state.layout.depth, r.max_depth) for r in requests)
        adaptive = [i for i, r in enumerate(requests) if r.options.get("adaptive", True)]
        chosen: list[Ints | None] = [None] * len(requests)
        if self._cost is None or not adaptive:
            return chosen, deepest
        worth = [requests[i].state.layout.worth(requests[i].state.rates.rates()) for i in adaptive]
        cost = self._cost.at(len(requests), mean_context(requests))
        nodes, _ = choose_nodes(worth, cost, self._head_seconds.get(len(requests), 0.0))
        needed = 0 if len(adaptive) == len(requests) else deepest
        probe = False
        for i, picked in zip(adaptive, nodes, strict=True):
            state: _State = requests[i].state
            chosen[i] = picked
            state.steps += 1
            probe |= state.steps % _PROBE_EVERY == 1
            if len(picked):
                needed = max(needed, int(state.layout.heads[picked[-1]]) + 1,
                             int(state.layout.heads[picked].max()) + 1)  # fmt: skip
        return chosen, deepest if probe else min(needed, deepest)

    def _proposal(
        self, request: DraftRequest, nodes: Ints | None, ids: np.ndarray[Any, Any]
    ) -> Proposal | None:
        """ids [heads, top_k]: this request's guesses."""
        state: _State = request.state
        layout = state.layout
        state.pending.append(_Guesses(len(request.tokens), ids.tolist()))
        tokens = ids[layout.heads[: layout.size] % len(ids), layout.ranks]
        limit, depth = request.max_drafts, min(request.max_depth, len(ids))
        if nodes is None and limit >= layout.size and depth >= layout.depth:
            parents = layout.parent_list
        else:
            if nodes is None:
                nodes = np.array(layout.tree.cut(limit, depth), dtype=np.int64)
            else:
                nodes = nodes[layout.heads[nodes] < depth][:limit]
            if len(nodes) == 0:
                return None
            tokens, parents = tokens[nodes], layout.subtree(nodes)
        self._num_proposals += 1
        self._num_nodes += len(parents)
        return Proposal(tokens.tolist(), parents)


def _hidden(request: DraftRequest) -> torch.Tensor:
    assert request.hidden is not None  # needs_hidden
    return request.hidden


def _prior(training: Mapping[str, Any], num_heads: int, top_k: int) -> np.ndarray[Any, Any]:
    """Rates to start from: those that the trainer has measured, else a cautious guess."""
    decay = _RANK_DECAY ** np.arange(top_k)
    prior = np.array([_FIRST_RATE * _HEAD_DECAY**h * decay for h in range(num_heads)])
    measured = training.get("guess_rates")
    try:
        for head, row in enumerate((measured or [])[:num_heads]):
            values = np.clip(np.array(row[:top_k], dtype=np.float64), 0.0, 1.0)
            prior[head, : len(values)] = values
            prior[head, len(values) :] = 0.0
    except (TypeError, ValueError):
        logger.warning("the heads' config.json has unusable training.guess_rates; ignored")
    return prior
