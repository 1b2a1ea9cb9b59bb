"""Nobody waits for ever, and no step takes pages that it was not promised.

Each case had stopped an engine for good, or one request in it: texts read again behind a window,
predictions beside steps in flight, drafts that come with a prompt, prompts read as a whole.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from driver import STEP_COST
from stream_driver import stream_hash_engine

from hash_target import HashFunction
from specdec_ext import _core

VOCAB = 100


def executor(num_pages: int, page_size: int = 16, **options: Any) -> Any:
    pages = torch.zeros(1, num_pages, 1, page_size, 8)
    about = {
        "vocab_size": VOCAB, "max_batch_size": 4, "max_seq_len": 4096, "max_num_tokens": 512,
        "check_integrity": True, **options,
    }  # fmt: skip
    return _core.Executor(pages, torch.zeros_like(pages), **about)


def upwards(plan: Any) -> Any:
    """A target that counts: the token behind t is t + 1."""
    tokens = np.asarray(plan.tokens)[np.asarray(plan.logit_rows)]
    return torch.from_numpy(((tokens + 1) % VOCAB).astype(np.int32))


def step(run: Any) -> list[Any] | None:
    plan = run.plan()
    if plan is not None:
        return list(run.commit(plan, upwards(plan)))
    return list(run.deliver()) if run.in_flight else None


def finish(run: Any, most: int = 20_000) -> Counter[int]:
    """Tokens of each request until all have ended."""
    got: Counter[int] = Counter()
    for _ in range(most):
        if not run.num_unfinished:
            break
        outputs = step(run)
        assert outputs is not None, "plan() has nothing, and requests wait"
        for out in outputs:
            assert out.finish_reason != "error", out.error
            got[out.request_id] += len(out.tokens)
    while run.in_flight:
        run.deliver()
    stats = run.stats()
    assert run.num_unfinished == 0 and stats["free_pages"] == stats["total_pages"]
    return got


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("window", "num_pages"), [(300, 24), (300, 34), (300, 80), (300, 100), (64, 8), (64, 12)]
)
def test_texts_longer_than_all_pages_are_read_again(
    window: int, num_pages: int, chunked: bool, reuse: bool
) -> None:
    run = executor(
        num_pages, policy="max_utilization", attention_window=window, max_batch_size=8,
        enable_chunked_prefill=chunked, enable_block_reuse=reuse,
    )  # fmt: skip
    first = run.submit(list(range(10)), max_tokens=1500, priority=1)
    got = Counter({first: 0})
    for _ in range(1000):
        got[first] += sum(len(out.tokens) for out in step(run) or [])
    urgent = [run.submit([i] * 10, max_tokens=100 + 200 * i, priority=0) for i in range(3)]
    got += finish(run)
    assert [got[r] for r in (first, *urgent)] == [1500, 100, 300, 500]


def test_a_long_urgent_prompt_beside_a_text_that_is_read_again() -> None:
    run = executor(80, policy="max_utilization", attention_window=300, max_batch_size=8)
    run.submit(list(range(10)), max_tokens=3000, priority=1)
    for _ in range(1500):
        step(run)
    urgent = [run.submit([i] * 600, max_tokens=100, priority=0) for i in range(3)]
    got = finish(run)
    assert [got[r] for r in urgent] == [100] * 3
    assert run.stats()["preemptions"] > 0


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("is_right", [True, False])
def test_a_prediction_keeps_to_the_pages_of_its_text(depth: int, is_right: bool) -> None:
    # 32 tokens, prompt and answer, are two pages: all there are.
    run = executor(2, max_batch_size=1, overlap_depth=depth)
    prediction = list(range(11, 60)) if is_right else [0] * 49
    request = run.submit(list(range(10)), max_tokens=22, prediction=prediction)
    assert finish(run) == {request: 22}
    again = run.submit(list(range(10)), max_tokens=22, prediction=prediction)
    assert finish(run) == {again: 22}


def test_a_prompt_with_drafts_keeps_no_rows_before_its_last() -> None:
    engine = stream_hash_engine(
        HashFunction(30), depth=1, page_size=16, num_pages=400, max_batch_size=4,
        max_seq_len=4096, max_num_tokens=131,
    )  # fmt: skip
    chosen = [engine.submit([1, 2, i], max_tokens=300, logprobs=0) for i in range(2)]
    for _ in range(10):
        engine.step()
    engine.submit([5] * 3000, max_tokens=130, external_drafts=[1] * 127)
    got: Counter[int] = Counter()
    for _ in range(16):
        for out in engine.step() or []:
            got[out.request_id] += len(out.tokens)
    assert min(got[r] for r in chosen) >= 6


def test_a_preempted_prompt_with_drafts_keeps_none_either() -> None:
    engine = stream_hash_engine(
        HashFunction(30), depth=1, page_size=1, num_pages=2400, max_batch_size=10,
        max_seq_len=2000, max_num_tokens=138, policy="max_utilization",
    )  # fmt: skip
    run = engine.executor
    run.set_step_cost(*STEP_COST)
    for i in range(8):
        engine.submit([1, 2, i], max_tokens=400, priority=0)
    for _ in range(91):
        engine.step()
    late = engine.submit([5] * 1500, max_tokens=130, external_drafts=[1] * 127, priority=1)
    urgent, got = None, Counter[int]()
    for _ in range(3000):
        if not run.num_unfinished:
            break
        outputs = engine.step()
        assert outputs is not None, "plan() has nothing, and requests wait"
        for out in outputs:
            got[out.request_id] += len(out.tokens)
        if urgent is None and run.stats()["preempted"]:
            urgent = engine.submit([9] * 1200, max_tokens=60, logprobs=0, priority=-1)
    assert urgent is not None and got[urgent] == 60 and got[late] == 130


def test_prompts_behind_one_that_is_read_as_a_whole_do_not_overtake_it() -> None:
    run = executor(400, max_num_tokens=100, enable_chunked_prefill=False)
    running = {run.submit([1] * 10, max_tokens=60)}
    step(run)
    whole = run.submit([2] * 100, max_tokens=5)
    got = 0
    for i in range(150):
        if len(running) < 3:
            running.add(run.submit([3, i % 50], max_tokens=60))
        for out in step(run) or []:
            got += len(out.tokens) if out.request_id == whole else 0
            if out.finish_reason:
                running.discard(out.request_id)
    assert got == 5


@pytest.mark.parametrize(
    "method",
    [
        {"method": "lookahead", "lookahead": (4, 3, 4)},
        {"method": "proposed", "proposed_max_draft_len": 8, "proposed_max_path": 2},
    ],
)
def test_what_is_proposed_behind_a_plan_is_the_next_steps(method: dict[str, Any]) -> None:
    run = executor(64, adaptive=False, **method)
    request = run.submit([1, 2, 3], max_tokens=40)
    step(run)
    run.stage()
    run.propose(request, list(range(5, 13)))  # what comes: 4 is decided
    plan = run.build()
    (out,) = run.commit(plan, upwards(plan))
    assert out.error is None and out.tokens[:1] == [5]
    assert sum(finish(run).values()) + len(out.tokens) == 39


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_rows_of_a_step_whose_request_is_cancelled_count(steps: int) -> None:
    run = executor(64, method="ngram", ngram={"max_draft_len": 8}, adaptive=False)
    request = run.submit([7, 7, 7, 7], max_tokens=100)
    rows = 0
    for i in range(steps + 1):
        plan = run.plan()
        rows += plan.num_rows
        if i == steps:
            run.cancel(request)
        run.commit(plan, torch.full((plan.num_logit_rows,), 7, dtype=torch.int32))
    stats = run.stats()
    assert (stats["rows"], stats["late_results"], stats["empty_steps"]) == (rows, 1, 0)


def test_an_infinite_bias_is_refused() -> None:
    run = executor(8)
    with pytest.raises(ValueError, match=r"logit_bias\[5\] is inf: give a number"):
        run.submit([1, 2], max_tokens=2, logit_bias={5: float("inf")})
    run.submit([1, 2], max_tokens=2, logit_bias={3: float("-inf")})  # forbids it
