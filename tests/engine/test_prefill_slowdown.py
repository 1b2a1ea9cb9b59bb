"""Rows of prompts beside requests that decode: as many as T(rows) allows, and texts as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_loop_cases import FUNCTION, NGRAM, PROMPTS, assert_idle, make_engine

from specdec_ext import _core
from specdec_ext.config.engine import SchedulerConfig
from specdec_ext.engine.loop import EngineLoop
from specdec_ext.errors import ConfigError
from specdec_ext.request.sampling_params import SamplingParams

LONG = [(7 * i + 3) % 60 for i in range(150)]
# T(rows) = 8 + rows.
COST = ([1, 2, 128], [9.0, 10.0, 136.0])
METHODS = {"none": None, "ngram": NGRAM}


def rows_of_steps(engine: EngineLoop) -> list[tuple[int, int]]:
    """Rows of prompts and requests of each step from now on."""
    seen: list[tuple[int, int]] = []
    model: Any = engine.model
    forward = model.forward

    def watched(plan: Any) -> Any:
        seen.append((plan.num_prefill_rows, plan.num_requests))
        return forward(plan)

    model.forward = watched
    return seen


def decode_beside(
    slowdown: float, *, method: str = "none", cost: Any = COST, **options: Any
) -> tuple[list[tuple[int, int]], int]:
    """Two requests decode, then a long prompt comes; the steps until it has been read."""
    config = METHODS[method]
    engine = make_engine(config, num_pages=128, max_prefill_slowdown=slowdown, **options)
    if cost is not None:
        engine.executor.set_step_cost(*cost)
    params = SamplingParams(max_tokens=40)
    states = [engine.submit(engine.resolve(prompt, params)) for prompt in PROMPTS[:2]]
    for _ in range(2):
        engine.step()
    seen = rows_of_steps(engine)
    states.append(engine.submit(engine.resolve(LONG, params)))
    engine.run(states)
    for prompt, state in zip([*PROMPTS[:2], LONG], states, strict=True):
        assert state.token_ids == FUNCTION.reference(prompt, 40)
    assert_idle(engine)
    return [(rows, requests) for rows, requests in seen if rows], len(seen)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_takes_as_many_rows_as_its_time_allows(method: str) -> None:
    # T(2 + rows) <= slowdown * T(2) = slowdown * 10: at 4, 30 rows; the last of 150 stand alone.
    steps, _ = decode_beside(4.0, method=method)
    assert [rows for rows, _ in steps] == [30] * 5
    steps, _ = decode_beside(7.0, method=method)
    assert [rows for rows, _ in steps] == [60, 60, 30]


@pytest.mark.parametrize("slowdown", [1.0, 1.5])
def test_a_prompt_goes_on_by_sixteen_rows_at_least(slowdown: float) -> None:
    steps, _ = decode_beside(slowdown)
    rows = [rows for rows, _ in steps]
    assert rows[:8] == [16] * 8 and sum(rows) == 150


@pytest.mark.parametrize(
    "how", [{"slowdown": 0.0}, {"slowdown": 4.0, "cost": None}], ids=["no limit", "T unknown"]
)
def test_without_a_limit_a_step_is_filled(how: dict[str, Any]) -> None:
    steps, _ = decode_beside(**how)
    assert [rows for rows, _ in steps] == [126, 24]  # max_num_tokens = 128, two rows decode


def test_prompts_that_are_not_split_are_not_limited() -> None:
    engine = make_engine(max_prefill_slowdown=1.0, enable_chunked_prefill=False)
    engine.executor.set_step_cost(*COST)
    params = SamplingParams(max_tokens=40)
    states = [engine.submit(engine.resolve(PROMPTS[0], params))]
    engine.step()
    seen = rows_of_steps(engine)
    states.append(engine.submit(engine.resolve(LONG[:100], params)))
    engine.run(states)
    assert [rows for rows, _ in seen if rows] == [100]


def test_nobody_decodes_nobody_waits() -> None:
    engine = make_engine(max_prefill_slowdown=1.0)
    engine.executor.set_step_cost(*COST)
    seen = rows_of_steps(engine)
    state = engine.submit(engine.resolve(LONG, SamplingParams(max_tokens=2)))
    engine.run([state])
    assert [rows for rows, _ in seen if rows] == [128, 22]


def test_rows_of_a_long_prompt_cost_what_they_read() -> None:
    # T(rows) = 8 + rows, and each row 0.05 more for each token that it reads beyond 20:
    # 30 = rows + 0.05 * rows * max(0, start + rows / 2 - 20).
    growth = [0.05, 0.1, 6.4]
    steps, _ = decode_beside(4.0, cost=([1, 2, 128], [9.0, 10.0, 136.0], 20.0, growth))
    rows = [rows for rows, _ in steps]
    start, expected = 0, []
    while start < len(LONG):
        left = range(1, len(LONG) - start + 1)
        fits = [n for n in left if n + 0.05 * n * max(0.0, start + n / 2 - 20) <= 30.0]
        expected.append(min(max(16, fits[-1]), len(LONG) - start))
        start += expected[-1]
    assert rows == expected and rows[0] > 16
    # What steps have shown scales both.
    steps, _ = decode_beside(4.0, cost=(*COST, 0.0, [], (0.5, 1.0)))
    assert [rows for rows, _ in steps] == [60, 60, 30]


def test_several_prompts_share_the_rows() -> None:
    engine = make_engine(num_pages=128, max_prefill_slowdown=4.0)
    engine.executor.set_step_cost(*COST)
    params = SamplingParams(max_tokens=60)
    states = [engine.submit(engine.resolve(PROMPTS[0], params))]
    engine.step()
    seen = rows_of_steps(engine)
    states += [engine.submit(engine.resolve(LONG[i:60], params)) for i in range(2)]
    engine.run(states)
    for state in states:
        assert state.token_ids == FUNCTION.reference(list(state.prompt_token_ids), 60)
    # T(1) = 9: 27 rows, and 30 once the first of the two decodes, too.
    assert [rows for rows, _ in seen if rows] == [27, 27, 27, 30, 8]


@pytest.mark.parametrize("slowdown", [0.5, -1.0, float("nan"), True, "4"])
def test_what_is_no_factor_is_refused(slowdown: Any) -> None:
    with pytest.raises(ConfigError, match=r"SchedulerConfig\.max_prefill_slowdown"):
        SchedulerConfig(max_prefill_slowdown=slowdown)
    if type(slowdown) is float:
        with pytest.raises(ValueError, match="max_prefill_slowdown = "):
            _core.Executor(vocab_size=8, max_seq_len=8, max_num_tokens=32, num_pages=8, page_size=4,
                           max_prefill_slowdown=slowdown)  # fmt: skip


def test_who_is_not_alone_asks_for_the_times_of_steps() -> None:
    asked: list[int] = []
    cases = ((LONG, 1, True, 1), (LONG, 0, True, 0), (PROMPTS[0], 1, True, 1), (LONG, 1, False, 0))
    for prompt, others, spares, wanted in cases:
        engine = make_engine(calibrate=lambda: asked.append(1))
        engine._spares_others = spares
        params = SamplingParams(max_tokens=4)
        states = [engine.submit(engine.resolve(PROMPTS[1], params)) for _ in range(others)]
        engine.step()
        states.append(engine.submit(engine.resolve(prompt, params)))
        engine.run(states)
        assert len(asked) == wanted, (prompt, others)
        asked.clear()


@pytest.mark.parametrize(
    "drafts",
    [{"prediction": [7, 8, 9, 10]}, {"grammar": True, "forced": [7]}, {"external_drafts": [7]}],
    ids=lambda drafts: next(iter(drafts)),
)
def test_a_prompt_with_drafts_behind_it_is_held_to_the_limit_but_for_these(
    drafts: dict[str, Any],
) -> None:
    pages = torch.zeros(1, 400, 1, 16, 1)
    executor = _core.Executor(
        pages, pages.clone(), vocab_size=64, max_batch_size=4, max_seq_len=4096,
        max_num_tokens=2048, method="suffix", max_prefill_slowdown=4.0,
    )  # fmt: skip
    executor.set_step_cost([1, 2048], [9.0, 2056.0])  # T(rows) = 8 + rows

    def step() -> Any:
        plan = executor.plan()
        ids = torch.full((plan.num_logit_rows,), 9, dtype=torch.int32)
        scores = torch.nn.functional.one_hot(ids.long(), 64).float()
        masks = {tree.request_id: np.empty((0, 2), np.int32) for tree in executor.choice_trees()}
        executor.commit(plan, scores if plan.needs_logits else ids, masks=masks)
        return plan

    executor.submit([1, 2, 3], max_tokens=400, ignore_eos=True, speculative=False)
    for _ in range(3):
        step()
    executor.submit([i % 50 for i in range(1900)], max_tokens=50, **drafts)
    rows = []
    while sum(rows) < 1900:
        rows.append(step().num_prefill_rows)
    # T(1 + rows) <= 4 T(1) = 36.
    assert max(rows) == 27 and rows[:-1] == [27] * (len(rows) - 1)
