"""Draft-target decoding: a second model writes ahead, the target checks.

All requests of a step share each pass of the draft model. What the model has read, where its K/V
lies and what it proposes is kept by _core.DraftRunner; this file decides how far to go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ... import _core
from ...config.methods import DraftTargetDecodingConfig
from ..base import DraftRequest, Proposal
from ..step_cost import StepCost, mean_context
from ..vocabulary import VocabularyMap
from .pace import ConfidenceRates, DraftBudget

if TYPE_CHECKING:
    from ...models import StepModel

__all__ = ["DraftTargetDrafter"]

# Rows of other requests' prompts in a pass of the draft model while texts are being decoded: a
# prompt is read in pieces, so that nobody waits for it.
_PREFILL_ROWS = 256


@dataclass
class _State:
    """One request here."""

    slot: int
    known: int  # tokens of the request that the runner has been told
    draws_by: str  # the runner's mode: "best", "coupled", "own"
    adaptive: bool
    rates: ConfidenceRates
    limit: int = 0  # drafts of this round
    deepest: int = 0  # a deeper draft would pass a limit of the request or of the draft model
    levels: int = 0  # trees: levels of this round
    count: int = 0  # drafts made in the round; trees: levels
    survival: list[float] = field(default_factory=list)
    idle: int = 0
    patience: int = DraftBudget.FIRST_PATIENCE

    @property
    def may_drop(self) -> bool:
        # A draft that was drawn and is accepted by its q must not be dropped for what it is.
        return self.draws_by != "own"


class DraftTargetDrafter:
    """A Drafter around a second StepModel.

    pages         K and V pages of the draft model, [layers, P, G, S, K] each
    max_requests  that decode at once
    max_rows      of one pass of the draft model
    max_len       positions that the draft model has; longer texts continue without drafts
    defer_moves   the pages lie on a device, where the model itself moves K/V (move_kv)
    """

    name = "draft_target"
    needs_hidden = False

    def __init__(
        self,
        config: DraftTargetDecodingConfig,
        model: StepModel,
        pages: tuple[torch.Tensor, torch.Tensor],
        vocabulary: VocabularyMap,
        *,
        vocab_size: int,
        max_requests: int,
        max_rows: int,
        max_len: int,
        enable_block_reuse: bool = False,
        defer_moves: bool = False,
    ) -> None:
        self.model = model
        self.runner = _core.DraftRunner(
            *pages,
            vocab_size=vocab_size,
            num_scores=vocabulary.num_scores,
            max_requests=max_requests,
            max_rows=max_rows,
            max_len=max_len,
            input_ids=vocabulary.input_ids,
            output_ids=vocabulary.output_ids,
            enable_block_reuse=enable_block_reuse,
            defer_moves=defer_moves,
        )
        model.bind_cache(*pages)
        self._move_kv: Any = getattr(model, "move_kv", None)  # a device's models have it
        self.budget = DraftBudget()
        self.watch: Callable[[Any, float], object] | None = None  # told of each pass's time
        self._config = config
        self._pages = pages
        self._max_requests, self._max_rows, self._max_len = max_requests, max_rows, max_len
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        # Rates over all requests; drafts of sampled ones come true less often.
        self._rates = {greedy: ConfidenceRates() for greedy in (True, False)}
        self._probs: torch.Tensor | None = None  # [slots, drafts, num_scores]
        self._vocab_ids: torch.Tensor | None = None
        self._forward_s = 0.0
        self._passes = 0
        self._rows = 0
        self._drafts = 0
        self._short_of_pages = 0
        self._too_long = 0

    @property
    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The draft model's K/V pages [layers, P, G, S, K]."""
        return self._pages

    def set_costs(self, target: StepCost, draft: StepCost) -> None:
        """Seconds of a pass by its rows, measured, of each model: adaptive lengths need them."""
        self.budget.set_costs(target, draft)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal | None]:
        """See Drafter."""
        states = [self._follow(request) for request in requests]
        paces = [s for s in states if s is not None]
        self.budget.begin(len(requests), mean_context(requests))
        if self._config.top_k > 1:
            self._draft_trees(paces, alone=len(requests) == 1)
            proposals = [self._tree(s) for s in states]
            self.budget.end([])
            return proposals
        self._draft_chains(paces, alone=len(requests) == 1)
        for s in paces:
            self.budget.drop(s)
        self.budget.end(paces)
        return [self._chain(s) for s in states]

    def end(self, request: DraftRequest) -> None:
        """See Drafter."""
        state, request.state = request.state, None
        if state is not None:
            self.runner.close(state.slot)

    def stats(self) -> Mapping[str, Any]:
        """See Drafter."""
        held = sum(t.numel() * t.element_size() for t in self._pages)
        probs = 0 if self._probs is None else self._probs.numel() * 4
        return {
            "memory_bytes": held + probs + self.runner.memory_bytes,
            "model": str(self.model.info.path),
            "forward_s": self._forward_s,
            "num_forward_passes": self._passes,
            "rows": self._rows,
            "num_drafts": self._drafts,
            "free_pages": self.runner.free_pages,
            "total_pages": self.runner.total_pages,
            "reused_pages": self.runner.reused_pages,
            "rounds_without_pages": self._short_of_pages,
            "rounds_beyond_positions": self._too_long,
            "expected_speedup": self.budget.speedup,
        }

    def _follow(self, request: DraftRequest) -> _State | None:
        """The request's state, told what the target has decided; None: no drafts for it."""
        state: _State | None = request.state
        if state is None:
            state = self._open(request)
            if state is None:
                return None
            request.state = state
        elif state.known < len(request.tokens):
            seen = self.runner.extend(state.slot, request.tokens[state.known :])
            state.known = len(request.tokens)
            self._learn(state.rates, seen)
        room = self._max_len - len(request.tokens)
        state.deepest = max(0, min(request.max_depth, room))
        state.limit = request.max_drafts if state.deepest > 0 else 0
        if self._config.top_k == 1:
            state.limit = min(state.limit, state.deepest)
        state.count = 0
        state.survival.clear()
        self._too_long += room <= 0
        return state

    def _learn(self, rates: ConfidenceRates, seen: list[tuple[float, bool]]) -> None:
        width = self._config.top_k  # all children of a token stand side by side
        for first in range(0, len(seen), width):
            rates.observe_level(any(came_true for _, came_true in seen[first : first + width]))
        for confidence, came_true in seen:
            if confidence > 0.0:  # 0: made from greedy ids, which say nothing of it
                rates.observe(confidence, came_true)

    def _open(self, request: DraftRequest) -> _State | None:
        options = request.options
        mode = "best"
        if not request.greedy and self._config.top_k == 1:
            if options["acceptance"] == "exact_match":
                # The target's own draw at each position: the closer the two models, the more alike.
                mode = "coupled"
            elif request.wants_probs and options["use_draft_logits"]:
                mode = "own"
                self._make_probs()
        slot = self.runner.open(
            request.tokens,
            mode=mode,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            seed=request.seed,
            cache_salt=request.cache_salt,
        )
        if slot < 0:
            return None
        rates = ConfidenceRates(self._rates[request.greedy])
        return _State(slot, len(request.tokens), mode, options["adaptive"], rates)

    def _make_probs(self) -> None:
        if self._probs is None:
            columns = self._vocabulary.num_scores
            shape = (self._max_requests, self._config.max_draft_len, columns)
            self._probs = torch.empty(shape, dtype=torch.float32)
            self.runner.bind_probs(self._probs)
            if columns < self._vocab_size:
                ids = self._vocabulary.output_ids or list(range(columns))
                self._vocab_ids = torch.tensor(ids, dtype=torch.int32)

    def _draft_chains(self, paces: list[_State], *, alone: bool) -> None:
        runner, budget, floor = self.runner, self.budget, self._config.min_confidence
        needs_scores = floor > 0 or any(
            s.draws_by != "best" or (s.adaptive and budget.known) for s in paces
        )
        active = [s for s in paces if s.count < s.limit]
        while active:
            if budget.known:
                chosen = budget.choose(active)
                active = [s for s, yes in zip(active, chosen, strict=True) if yes]
            if not active or not self._pass(active, needs_scores, alone):
                return
            following = []
            for s, token, confidence in zip(
                active, runner.statuses, runner.confidences, strict=True
            ):
                if token < 0:
                    if alone and token == runner.STILL_READING:
                        following.append(s)
                    self._note(token)
                    continue
                s.count += 1
                budget.add(s, confidence)
                if s.count < s.limit and confidence >= floor:
                    following.append(s)
            active = following

    def _draft_trees(self, paces: list[_State], *, alone: bool) -> None:
        runner, top_k = self.runner, self._config.top_k
        for s in paces:
            depth = min(self._config.max_draft_path_len, s.deepest)
            s.levels = self.budget.levels(s, top_k, s.limit, depth) if s.limit > 0 else 0
        active = [s for s in paces if s.levels > 0]
        while active:
            plan = self._plan(active, True, alone)
            if plan is not None:
                runner.take_level(self._forward(plan), top_k)
                self.budget.spend(plan.num_rows - plan.num_prefill_rows)
            following = []
            for s, status in zip(active, runner.statuses, strict=True):
                if status > 0:
                    s.count += 1
                    if s.count < s.levels:
                        following.append(s)
                elif alone and status == runner.STILL_READING:
                    following.append(s)
                else:
                    self._note(status)
            active = following

    def _pass(self, active: list[_State], needs_scores: bool, alone: bool) -> bool:
        """One pass of the draft model; False: there was nothing it could read."""
        plan = self._plan(active, needs_scores, alone)
        if plan is None:
            for status in self.runner.statuses:
                self._note(status)
            return False
        self.runner.take(self._forward(plan))
        self.budget.spend(len(active))
        return True

    def _plan(self, active: list[_State], needs_scores: bool, alone: bool) -> Any:
        moves = self.runner.take_moves()
        if moves is not None:
            self._move_kv(moves)
        return self.runner.plan([s.slot for s in active], self._prefill_rows(alone), needs_scores)

    def _prefill_rows(self, alone: bool) -> int:
        return self._max_rows if alone else min(_PREFILL_ROWS, self._max_rows)

    def _forward(self, plan: Any) -> torch.Tensor:
        begin = time.perf_counter()
        result = self.model.forward(plan)
        seconds = time.perf_counter() - begin
        self._forward_s += seconds
        if self.watch is not None:
            self.watch(plan, seconds)
        self._passes += 1
        self._rows += plan.num_rows
        return result

    def _note(self, status: int) -> None:
        self._short_of_pages += status == self.runner.NO_PAGES
        self._too_long += status == self.runner.TOO_LONG

    def _chain(self, state: _State | None) -> Proposal | None:
        if state is None or not state.survival:
            return None
        count = len(state.survival)
        self._drafts += count
        tokens = self.runner.drafts(state.slot, count)
        if state.draws_by != "own":
            return Proposal(tokens)
        assert self._probs is not None
        return Proposal(tokens, probs=self._probs[state.slot, :count], vocab_ids=self._vocab_ids)

    def _tree(self, state: _State | None) -> Proposal | None:
        if state is None or state.count == 0:
            return None
        tokens, parents, confidences = self.runner.best_tree(state.slot, state.limit)
        if state.adaptive and self.budget.known:
            kept = self.budget.cut_tree(parents, [state.rates.rate(c) for c in confidences])
            tokens, parents = _subtree(tokens, parents, kept)
        self._drafts += len(tokens)
        return Proposal(tokens, parents) if tokens else None


def _subtree(tokens: list[int], parents: list[int], kept: list[int]) -> tuple[list[int], list[int]]:
    """The nodes `kept`, ascending and closed under parents."""
    place = {-1: -1, **{old: new for new, old in enumerate(kept)}}
    return [tokens[i] for i in kept], [place[parents[i]] for i in kept]
