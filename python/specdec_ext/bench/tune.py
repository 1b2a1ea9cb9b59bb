"""The search for the configuration that pays most on a model, a machine and prompts.

Acceptance is counted by decoding the prompts with each configuration; in exact mode the counts, and
the tokens, are the same in every run. What a step costs comes from a table T(rows) measured on the
model once, so that noise of the clock cannot favour one configuration: the predicted speed-up is

    tokens * T(B)  /  sum over decode steps of T(B * rows of the step)

with B requests that run together. Drafting itself is not in it; it takes microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.step_cost import StepCost
from ..errors import EngineError
from ..request.sampling_params import SamplingParams
from ..text.metrics import ratio
from .measure import plain_params
from .search_space import Point, Space

__all__ = ["Candidate", "Tuning", "predicted_speedup", "tune"]

CHECK_ROUNDS = 3  # of the wall clock, best against plain
# A candidate is begun only if the slowest one so far, and a bit, still fits.
TIME_MARGIN = 1.25


@dataclass(frozen=True)
class Candidate:
    """What a configuration did on the prompts; decode steps only, prompts are read alike by all.

    drafts   drafts of every speculative step
    plain_steps  steps that had none
    """

    point: Point
    draft_len: int
    tokens: int
    accepted: int
    drafts: tuple[int, ...]
    plain_steps: int
    speedup: float
    is_coarse: bool

    @property
    def steps(self) -> int:
        return len(self.drafts) + self.plain_steps

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        return {
            **dict(zip(names, self.point, strict=True)),
            "max_draft_len": self.draft_len,
            "tokens_per_step": ratio(self.tokens, self.steps),
            "rows_per_step": 1.0 + ratio(sum(self.drafts), self.steps),
            "mean_acceptance_length": 1.0 + ratio(self.accepted, len(self.drafts)),
            "num_draft_tokens": sum(self.drafts),
            "num_accepted_draft_tokens": self.accepted,
            "predicted_speedup": self.speedup,
            "search": "coarse" if self.is_coarse else "fine",
        }


@dataclass
class Tuning:
    """All candidates in the order of the search; `stopped` is "complete" or "time"."""

    space: Space
    candidates: list[Candidate]
    num_tokens: int
    stopped: str
    seconds: float
    identical: bool
    measured_speedup: float | None = None

    @property
    def best(self) -> Candidate | None:
        """None: nothing is faster than plain decoding. Ties: fewer drafts."""
        if not self.candidates:
            return None
        best = max(self.candidates, key=lambda c: (c.speedup, -c.draft_len))
        return best if best.speedup > 1.0 else None


def predicted_speedup(
    tokens: int, drafts: Sequence[int], plain_steps: int, cost: Callable[[int], float], batch: int
) -> float:
    """See the head of this file."""
    spent = plain_steps * cost(batch) + sum(cost(batch * (1 + count)) for count in drafts)
    return tokens * cost(batch) / spent if spent else 1.0


def _decode(engine: Any, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Any]:
    """The finished requests, decoded together. Raises EngineError if one failed."""
    states = [engine.submit(engine.resolve(ids, params)) for ids in prompts]
    try:
        engine.run(states)
    except BaseException:
        for state in states:
            engine.cancel(state)
        raise
    for state in states:
        if state.error is not None:
            raise EngineError(f"a request failed: {state.error}")
    return states


def _count(
    space: Space,
    point: Point,
    states: Sequence[Any],
    cost: Callable[[int], float],
    batch: int,
    is_coarse: bool,
) -> Candidate:
    counters = [state.counter for state in states]
    # The pass that ends a prompt brings its first token.
    tokens = sum(len(state.token_ids) - 1 for state in states)
    steps = sum(c.num_steps - c.num_prefill_steps for c in counters)
    drafts = tuple(count for c in counters for count in c.per_step_drafted)
    plain_steps = steps - len(drafts)
    return Candidate(
        point,
        space.draft_len(point),
        tokens,
        sum(c.num_accepted for c in counters),
        drafts,
        plain_steps,
        predicted_speedup(tokens, drafts, plain_steps, cost, batch),
        is_coarse,
    )


def tune(
    engine_for: Callable[[Any], Any],
    space: Space,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    step_cost: Mapping[int, float],
    *,
    batch_size: int = 1,
    max_seconds: float = 300.0,
    limit: int = 127,
    on_candidate: Callable[[Candidate, int], None] | None = None,
) -> Tuning:
    """Coarse grid first, then uphill from its best point until no neighbour is better.

    engine_for    engine of a configuration (EngineBuilder.engine_for)
    max_seconds   no candidate is begun that is not expected to end in time; the first always is
    limit         drafts per step, at most
    on_candidate  told each candidate and how many there were
    Raises EngineError if a request fails, RequestError if one cannot run.
    """
    begin = time.perf_counter()
    cost = StepCost(dict(step_cost))
    plain = plain_params(params)
    expected = [list(s.token_ids) for s in _decode(engine_for(None), prompts, plain)]
    slowest = time.perf_counter() - begin
    result = Tuning(space, [], sum(map(len, expected)), "complete", 0.0, True)
    done: dict[Point, Candidate] = {}

    def in_time() -> bool:
        spent = time.perf_counter() - begin
        return not done or spent + TIME_MARGIN * slowest <= max_seconds

    def try_point(point: Point, is_coarse: bool) -> None:
        nonlocal slowest
        started = time.perf_counter()
        states = _decode(engine_for(space.config(point, adaptive=False)), prompts, params)
        result.identical &= [list(s.token_ids) for s in states] == expected
        done[point] = _count(space, point, states, cost, batch_size, is_coarse)
        result.candidates.append(done[point])
        slowest = max(slowest, time.perf_counter() - started)
        if on_candidate is not None:
            on_candidate(done[point], len(done))

    def search() -> str:
        for point in space.coarse_points(limit):
            if not in_time():
                return "time"
            try_point(point, True)
        while True:
            top = max(done.values(), key=lambda c: (c.speedup, -c.draft_len))
            fresh = [p for p in space.neighbours(top.point, limit) if p not in done]
            for point in fresh:
                if not in_time():
                    return "time"
                try_point(point, False)
            if max(done.values(), key=lambda c: (c.speedup, -c.draft_len)) is top:
                return "complete"

    result.stopped = search()
    if result.best is not None and in_time():
        result.measured_speedup = _check(
            engine_for(space.config(result.best.point, adaptive=False)), prompts, params, in_time
        )
    result.seconds = time.perf_counter() - begin
    return result


def _check(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    in_time: Callable[[], bool],
) -> float | None:
    """Plain time / time by the wall clock, all prompts together, median of rounds."""
    import statistics

    ratios = []
    for i in range(CHECK_ROUNDS):
        kinds = [params, plain_params(params)]
        seconds: dict[int, float] = {}
        for kind in (0, 1) if i % 2 == 0 else (1, 0):
            begin = time.perf_counter()
            _decode(engine, prompts, kinds[kind])
            seconds[kind] = time.perf_counter() - begin
        ratios.append(seconds[1] / seconds[0])
        if not in_time():
            break
    return statistics.median(ratios)
