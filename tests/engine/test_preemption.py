"""max_utilization: requests that give their pages back and compute them again.

They end with the text, the scores and the reason that they have alone, whatever drafts for them and
wherever steps run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from engine_loop_cases import FUNCTION, assert_idle, make_engine
from method_cases import Folders, Where, at_every_depth, on_devices, open_llm
from preemption_cases import (
    LONG,
    METHODS,
    PAGE,
    POOL,
    check_idle,
    open_scarce,
    result,
    wanted,
)

from specdec_ext import RequestError, SamplingParams
from specdec_ext.engine.loop import EngineLoop
from specdec_ext.engine.request_state import RequestState


@at_every_depth
@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
@pytest.mark.parametrize("method", METHODS)
def test_what_was_preempted_ends_as_it_does_alone(
    models: Folders, alone: Callable[[str], list[Any]], method: str, where: Where, reuse: bool
) -> None:
    pages = {**POOL, "enable_block_reuse": reuse}
    with open_scarce(models, method, where, kv_cache_config=pages) as llm:
        params = [wanted(i) for i in range(len(LONG))]
        found = [result(o) for o in llm.generate(LONG, params, use_tqdm=False)]
        stats = check_idle(llm)
    assert found == alone(where.device)
    assert stats["preemptions"] > 0
    assert stats["recomputed_tokens"] > 0


@on_devices
@pytest.mark.parametrize(
    ("method", "depth"),
    [
        ("plain", 0), ("medusa", 2), ("chain", 1),
        *(pytest.param(m, d, marks=pytest.mark.slow) for m in METHODS for d in (0, 1, 2)),
    ],
)  # fmt: skip
def test_what_was_preempted_on_a_device_ends_as_it_does_alone(
    models: Folders, alone: Callable[[str], list[Any]], method: str, where: Where, depth: int
) -> None:
    place = Where(where.place, depth)
    test_what_was_preempted_ends_as_it_does_alone(models, alone, method, place, depth != 1)


def engine(num_pages: int, **options: Any) -> EngineLoop:
    """On the hash target, whose text the caches alone decide; pages of 4 tokens."""
    return make_engine(
        num_pages=num_pages, page_size=PAGE, policy="max_utilization", max_seq_len=64, **options
    )


def submit(loop: EngineLoop, prompt: list[int], tokens: int, **more: Any) -> RequestState:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **more)
    return loop.submit(loop.resolve(prompt, params))


def test_published_pages_of_a_preempted_request_are_taken_over_again() -> None:
    loop = engine(15, enable_block_reuse=True)
    prompts = [list(range(1, 19)), list(range(2, 20))]
    states = [submit(loop, prompt, 20) for prompt in prompts]
    loop.run(states)
    assert [s.token_ids for s in states] == [FUNCTION.reference(p, 20) for p in prompts]
    stats = loop.get_metrics()["executor"]
    assert stats["preemptions"] == 1
    # It had read 18 tokens and some of its own; most of their pages were still there.
    assert stats["attached_pages"] >= 3
    assert 0 < stats["recomputed_tokens"] < 16
    assert all(s.snapshot().num_cached_tokens == 0 for s in states)  # not of another request


def test_the_least_urgent_gives_way_and_the_most_urgent_starts_first() -> None:
    loop = engine(16, max_batch_size=3)
    ends: dict[str, int] = {}
    states = {}
    for name, priority in (("late", 2), ("normal", 0), ("later", 2), ("urgent", -1)):
        params = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, priority=priority)
        states[name] = loop.submit(loop.resolve(list(range(3, 15)), params))
    for step in itertools.count():
        if not loop.step():
            break
        ends |= {n: step for n, s in states.items() if s.finished and n not in ends}
    assert ends["urgent"] <= ends["normal"] < ends["late"] < ends["later"]
    assert loop.get_metrics()["executor"]["preemptions"] > 0


def test_a_preempted_request_can_be_cancelled() -> None:
    loop = engine(16)
    states = [submit(loop, list(range(3, 15)), 30) for _ in range(3)]
    while not loop.get_metrics()["executor"]["preempted"]:
        loop.step()
    assert loop.cancel(states[-1])
    assert states[-1].finish_reason == "cancelled"
    loop.run(states)
    for state in states:
        text = FUNCTION.reference(list(range(3, 15)), 30)
        assert state.token_ids == text[: len(state.token_ids)]
    assert [len(state.token_ids) for state in states[:2]] == [30, 30]
    assert_idle(loop)


@pytest.mark.parametrize("count", [8])
def test_a_pool_of_one_request_and_a_page_serves_many(count: int) -> None:
    loop = engine(14 + 1, max_batch_size=count)
    prompts = [[i + 1, i + 2, i + 3] for i in range(count)]
    states = [submit(loop, prompt, 50) for prompt in prompts]
    loop.run(states)
    assert [s.token_ids for s in states] == [FUNCTION.reference(p, 50) for p in prompts]
    assert loop.get_metrics()["executor"]["preemptions"] >= count - 1
    assert_idle(loop)


def test_both_policies_give_the_same_texts_in_a_large_pool(models: Folders) -> None:
    found = []
    for policy in ("guaranteed_no_evict", "max_utilization"):
        with open_llm(models, None, scheduler={"policy": policy}) as llm:
            params = [wanted(i) for i in range(len(LONG))]
            found.append([result(o) for o in llm.generate(LONG, params, use_tqdm=False)])
            assert llm.get_metrics()["executor"]["preemptions"] == 0
    assert found[0] == found[1]


@pytest.mark.parametrize("priority", [-(2**31) - 1, 2**31, 0.5, "high", True])
def test_priorities_out_of_range_are_refused(priority: Any) -> None:
    with pytest.raises(RequestError, match=r"SamplingParams\.priority = .*"):
        SamplingParams(priority=priority)
