"""max_utilization: requests whose K/V is copied to the host's pool and back.

They end as they do alone. Between steps every page that nobody holds is NaN, of the target and of
what drafts for it, so a page that was not copied shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from engine_loop_cases import FUNCTION, make_engine
from engine_loop_cases import METHODS as HASHED
from method_cases import (
    GREEDY,
    PROMPTS,
    Folders,
    Where,
    at_every_depth,
    methods,
    on_devices,
    open_llm,
    texts_of,
)
from preemption_cases import LONG, METHODS, PAGE, POOL, check_idle, open_scarce, result, wanted

from specdec_ext import LLM, SamplingParams, _core
from specdec_ext.engine.host_pool import HostPool
from specdec_ext.engine.loop import EngineLoop
from specdec_ext.models.host_arrays import as_torch

ROOM = {"host_cache_size": 1 << 26, "host_link_gb_per_s": 1e6}  # copies are always cheaper


@contextmanager
def poisoned(llm: LLM) -> Iterator[None]:
    """Behind each step, what lies in pages that nobody holds is NaN."""
    engine, pool = llm.engine, llm._builder._host_pool
    assert pool is not None
    count = llm.memory.num_pages
    memory = []
    for pages in pool.pools:
        tensor = as_torch(pages)
        tensor = tensor if tensor.ndim > 3 else tensor[None]
        memory.append(tensor.view(dtype=_bytes()))
    step, pipeline = engine.step, getattr(engine, "_pipeline", None)

    def stepped() -> bool:
        begun = getattr(pipeline, "_enqueued", None)
        went_on = step()
        # Copies that were ordered go with the next step that is enqueued; pages lie there so long.
        if pipeline is not None and pipeline._enqueued == begun:
            return went_on
        held: set[int] = set()
        for rid in list(engine._states):
            held.update(engine.executor.pages(rid))
        free = [page for page in range(count) if page not in held]
        for tensor in memory:
            # A float of ones is NaN, so is the scale of int8.
            tensor[:, [page for page in free if page < tensor.shape[1]]] = 0xFF
        return went_on

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "step", stepped)
        yield


def _bytes() -> Any:
    import torch

    return torch.uint8


def check_swapped(llm: LLM, *, all_of_them: bool = True) -> dict[str, Any]:
    stats = check_idle(llm)
    assert stats["host_free_pages"] == stats["host_total_pages"] > 0
    assert stats["swapped_out"] == stats["swapped_in"] > 0
    assert stats["swapped_out_bytes"] % llm.memory.host_page_bytes == 0
    assert stats["swapped_in_bytes"] <= stats["swapped_out_bytes"]
    if all_of_them:
        assert stats["swapped_out"] == stats["preemptions"]
        assert stats["recomputed_tokens"] == 0
    return stats


@at_every_depth
@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
@pytest.mark.parametrize("method", METHODS)
def test_what_was_swapped_ends_as_it_does_alone(
    models: Folders, alone: Callable[[str], list[Any]], method: str, where: Where, reuse: bool
) -> None:
    pages = {**POOL, **ROOM, "enable_block_reuse": reuse}
    with open_scarce(models, method, where, kv_cache_config=pages) as llm:
        params = [wanted(i) for i in range(len(LONG))]
        if reuse:  # cached pages are nobody's, too
            found = llm.generate(LONG, params, use_tqdm=False)
        else:
            with poisoned(llm):
                found = llm.generate(LONG, params, use_tqdm=False)
        stats = check_swapped(llm, all_of_them=not reuse)
    assert [result(o) for o in found] == alone(where.device)
    if not reuse:
        assert stats["swapped_in_bytes"] == stats["swapped_out_bytes"]


@on_devices
@pytest.mark.parametrize(
    ("method", "depth"),
    [
        ("plain", 0), ("medusa", 2), ("chain", 1),
        *(pytest.param(m, d, marks=pytest.mark.slow) for m in METHODS for d in (0, 1, 2)),
    ],
)  # fmt: skip
def test_what_was_swapped_on_a_device_ends_as_it_does_alone(
    models: Folders, alone: Callable[[str], list[Any]], method: str, where: Where, depth: int
) -> None:
    place = Where(where.place, depth)
    test_what_was_swapped_ends_as_it_does_alone(models, alone, method, place, reuse=depth == 1)


@methods(["eagle3", "eagle3-chain", "suffix past", "public", "user", "redrafter-law"])
def test_what_only_the_host_drafts(
    models: Folders, plain_texts: dict[str, Any], method: str
) -> None:
    scheduler = {"max_batch_size": 6, "max_num_tokens": 96, "policy": "max_utilization"}
    cache = {"tokens_per_block": 8, "max_tokens": 128, **ROOM}
    with open_llm(models, method, scheduler=scheduler, kv_cache_config=cache) as llm:
        with poisoned(llm):
            assert texts_of(llm, GREEDY) == plain_texts["greedy"]
        check_swapped(llm)
        assert llm.get_metrics()["speculative_decoding"]["num_accepted_draft_tokens"] > 0


@pytest.mark.parametrize("where", [Where("host"), Where("stream", 1)], ids=["host", "stream"])
@pytest.mark.parametrize("swaps", [True, False], ids=["copied", "read again"])
def test_a_draft_model_goes_on_where_it_was(models: Folders, where: Where, swaps: bool) -> None:
    """The target itself drafts: a draft that is not accepted comes of K/V that is not there."""
    from specdec_ext import DraftTargetDecodingConfig

    spec = DraftTargetDecodingConfig(models["target"], max_draft_len=3, adaptive=False)
    scheduler = {"max_batch_size": 6, "max_num_tokens": 64, "policy": "max_utilization"}
    cache = {"tokens_per_block": 8, "max_tokens": 128, **(ROOM if swaps else {})}
    with open_llm(models, spec, where, scheduler=scheduler, kv_cache_config=cache) as llm:
        if swaps:
            with poisoned(llm):
                texts_of(llm, GREEDY)
            check_swapped(llm)
        else:
            texts_of(llm, GREEDY)
        metrics = llm.get_metrics()
    spec_stats = metrics["speculative_decoding"]
    # What is behind the end of a text is not counted of its last step.
    lost = spec_stats["num_draft_tokens"] - spec_stats["num_accepted_draft_tokens"]
    assert lost <= 3 * len(PROMPTS)
    rows = metrics["drafter"]["rows"]
    tokens = sum(map(len, PROMPTS)) + metrics["generation_tokens"]
    assert (rows <= tokens + 4 * len(PROMPTS)) == swaps


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("method", ["none", "tree"])
def test_narrow_types(models: Folders, method: str, dtype: str) -> None:
    """Scales lie in the pages, and go with them."""
    large = {"tokens_per_block": 8, "max_tokens": 1600, "dtype": dtype}
    with open_llm(models, None, kv_cache_config=large) as llm:
        expected = texts_of(llm, GREEDY)
    scheduler = {"max_batch_size": 6, "max_num_tokens": 64, "policy": "max_utilization"}
    scarce = {**large, "max_tokens": 128, **ROOM}
    with open_llm(models, method, scheduler=scheduler, kv_cache_config=scarce) as llm:
        with poisoned(llm):
            assert texts_of(llm, GREEDY) == expected
        check_swapped(llm)


@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
@pytest.mark.parametrize("method", ["none", "lookahead", "chain"])
@pytest.mark.parametrize("sinks", [0, 5])
def test_attention_windows(models: Folders, method: str, sinks: int, reuse: bool) -> None:
    """Blocks behind the window have no page, before and after."""
    shape = {"max_attention_window": 18, "sink_token_length": sinks, "tokens_per_block": PAGE}
    with open_llm(models, None, kv_cache_config={**shape, "max_tokens": 1600}) as llm:
        expected = texts_of(llm, GREEDY)
    scheduler = {"policy": "max_utilization", "max_num_tokens": 40, "max_batch_size": 6}
    scarce = {**shape, **ROOM, "max_tokens": 19 * PAGE, "enable_block_reuse": reuse}
    with open_llm(models, method, kv_cache_config=scarce, scheduler=scheduler) as llm:
        if reuse:
            assert texts_of(llm, GREEDY) == expected
        else:
            with poisoned(llm):
                assert texts_of(llm, GREEDY) == expected
        check_swapped(llm, all_of_them=False)


# -- the law, room and ends, on the hash target ---------------------------------------------------


def engine(num_pages: int, host_pages: int, where: int | None = None, **options: Any) -> EngineLoop:
    """Pages of 4 tokens. where: None for the host, else an overlap depth on a stream."""
    options = {"host_page_bytes": 1000, "num_host_pages": host_pages, **options}
    loop = make_engine(
        num_pages=num_pages, page_size=PAGE, policy="max_utilization", max_seq_len=64,
        overlap_depth=where, **options,
    )  # fmt: skip
    model: Any = loop.model
    if where is None:
        copies = [np.zeros((host_pages, *_each(p)), np.float32) for p in _pages(model)]
        pairs = list(zip(_pages(model), copies, strict=True))
        loop.executor.bind_host_pages(_core.PagePools(pairs))
    else:
        pool = HostPool(_pages(model), host_pages, on_stream=True)
        loop._pipeline._host_pool = pool  # type: ignore[attr-defined]
    return loop


def _pages(model: Any) -> list[Any]:
    return [model.k_pages, model.v_pages]


def _each(pages: Any) -> tuple[int, ...]:
    layers, _, *rest = pages.shape
    return (layers, *rest)


def submit(loop: EngineLoop, prompt: list[int], tokens: int, **more: Any) -> Any:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **more)
    return loop.submit(loop.resolve(prompt, params))


def check_nothing_left(loop: EngineLoop) -> dict[str, Any]:
    stats = dict(loop.executor.stats())
    assert (stats["running"], stats["waiting"], stats["preempted"]) == (0, 0, 0)
    assert stats["free_pages"] == stats["total_pages"]
    assert stats["host_free_pages"] == stats["host_total_pages"]
    return stats


PLACES = pytest.mark.parametrize("where", [None, 0, 1, 2], ids=["host", "0", "1", "2"])


@PLACES
@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
@pytest.mark.parametrize("method", HASHED)
def test_many_swaps(where: int | None, method: str, reuse: bool) -> None:
    """A pool of one request and a page for six; the host has room for some of them."""
    swapped = 0
    for seed in range(4):
        rng = random.Random(seed)
        config = HASHED[method]
        # Only the longest text fits, and its drafts.
        drafts = 0 if config is None else config.max_draft_len
        loop = engine(
            (63 + drafts) // PAGE + 2, rng.choice([9, 40, 200]), where, config=config,
            max_batch_size=6, enable_block_reuse=reuse,
        )  # fmt: skip
        common = [rng.randrange(6) for _ in range(9)]
        prompts = [common + [rng.randrange(6) for _ in range(rng.randrange(8))] for _ in range(6)]
        states = [submit(loop, prompt, 40) for prompt in prompts]
        loop.run(states)
        assert [s.token_ids for s in states] == [FUNCTION.reference(p, 40) for p in prompts]
        stats = check_nothing_left(loop)
        swapped += stats["swapped_out"]
        assert stats["swapped_in"] == stats["swapped_out"]
    assert swapped > 8


@PLACES
@pytest.mark.parametrize("dear", [False, True], ids=["fast link", "slow link"])
def test_the_cheaper_of_the_two_is_done(where: int | None, dear: bool) -> None:
    # A text of 20 to 40 tokens is read in 20 to 40 seconds; a page out and back takes 1 or 100.
    loop = engine(16, 100, where, host_bytes_per_second=20.0 if dear else 2000.0)
    loop.executor.set_step_cost([1, 2, 3], [1.0, 2.0, 3.0])
    states = [submit(loop, list(range(i, i + 12)), 30) for i in range(3)]
    loop.run(states)
    stats = check_nothing_left(loop)
    assert stats["preemptions"] > 0
    assert stats["swapped_out"] == (0 if dear else stats["preemptions"])
    assert (stats["recomputed_tokens"] > 0) == dear
    assert stats["host_pool_full"] == 0


@PLACES
def test_a_full_pool_computes_again(where: int | None) -> None:
    loop = engine(16, 2, where)
    states = [submit(loop, list(range(i, i + 12)), 30) for i in range(3)]
    loop.run(states)
    for i, state in enumerate(states):
        assert state.token_ids == FUNCTION.reference(list(range(i, i + 12)), 30)
    stats = check_nothing_left(loop)
    assert stats["host_pool_full"] == stats["preemptions"] > 0
    assert stats["swapped_out"] == 0
    assert stats["recomputed_tokens"] > 0


@PLACES
def test_cancelled_while_it_is_swapped_out(where: int | None) -> None:
    loop = engine(16, 100, where)
    states = [submit(loop, list(range(i, i + 12)), 30) for i in range(3)]
    while not loop.get_metrics()["executor"]["preempted"]:
        loop.step()
    assert loop.executor.stats()["host_free_pages"] < 100
    assert loop.cancel(states[-1])
    assert loop.executor.stats()["host_free_pages"] == 100
    loop.run(states)
    for i, state in enumerate(states[:2]):
        assert state.token_ids == FUNCTION.reference(list(range(i, i + 12)), 30)
    check_nothing_left(loop)


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("to_host", [True, False], ids=["out", "back"])
def test_a_copy_that_fails(where: int, to_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of that step end with the error; whose pages were lost computes them again."""
    loop = engine(20, 100, where)
    whole = HostPool.copy
    failures: list[int] = []

    def copy(self: HostPool, stream: Any, out: bool, *numbers: Any) -> None:
        if out == to_host and not failures:
            failures.append(numbers[0])
            raise OSError("the link is down")
        whole(self, stream, out, *numbers)

    monkeypatch.setattr(HostPool, "copy", copy)
    states = [submit(loop, list(range(i, i + 12)), 30) for i in range(4)]
    loop.run(states)
    assert failures
    reasons = [state.finish_reason for state in states]
    assert "error" in reasons
    assert "length" in reasons
    for i, state in enumerate(states):
        text = FUNCTION.reference(list(range(i, i + 12)), 30)
        assert state.token_ids == text[: len(state.token_ids)]
        assert state.finish_reason == "error" or len(state.token_ids) == 30
    check_nothing_left(loop)


def test_what_others_hold_is_not_copied() -> None:
    """Two requests share a long beginning: who gives way copies what is its own alone."""
    loop = engine(22, 100, enable_block_reuse=True, max_batch_size=2)
    common = [i % 7 for i in range(32)]
    prompts = [[*common, 1, 2, 3], [*common, 4, 5, 6]]
    states = [submit(loop, prompt, 28) for prompt in prompts]
    loop.run(states)
    assert [s.token_ids for s in states] == [FUNCTION.reference(p, 28) for p in prompts]
    stats = check_nothing_left(loop)
    assert stats["swapped_out"] > 0
    own = 28 // PAGE + 2
    assert stats["swapped_out_bytes"] <= stats["swapped_out"] * own * 1000


def test_an_engine_without_pools_says_so() -> None:
    loop = make_engine(
        num_pages=16, page_size=PAGE, policy="max_utilization", num_host_pages=3, host_page_bytes=1
    )
    with pytest.raises(ValueError, match=r"num_host_pages = 3 needs bind_host_pages\(\) first"):
        loop.executor.plan()


@pytest.mark.parametrize("budget", [8, 128], ids=["in several steps", "in one step"])
def test_a_prefix_that_is_lost_while_others_hold_it_is_read_again_in_front_of_what_came_back(
    budget: int,
) -> None:
    """A request is swapped out without the blocks that another one holds; that one ends, and they
    are forgotten. What was copied back lies behind the gap, however many steps that takes."""
    for spare in (2, 3, 4, 5):
        loop = engine(
            28, 100, enable_block_reuse=True, max_batch_size=3, max_num_tokens=budget,
        )  # fmt: skip
        common = [i % 7 for i in range(32)]
        prompts = [[*common, 1, 2, 3], [*common, 4, 5, 6], [5, 6, 8, 9, 10, 11][:spare]]
        holder = submit(loop, prompts[1], 28)
        moved = submit(loop, prompts[0], 28, priority=5)
        other = submit(loop, prompts[2], 55, priority=1)
        while not loop.executor.stats()["preempted"]:
            assert loop.step()
        loop.cancel(holder)
        loop.reset_prefix_cache()
        loop.run([moved, other])
        stats = check_nothing_left_but_cached(loop)
        assert stats["swapped_in"] == 1 and stats["recomputed_tokens"] == len(common)
        assert moved.token_ids == FUNCTION.reference(prompts[0], 28)
        assert other.token_ids == FUNCTION.reference(prompts[2], 55)
        # Nor is anything wrong published.
        prompt = [*prompts[0], *moved.token_ids[:20]]
        later = submit(loop, prompt, 8)
        loop.run([later])
        assert later.token_ids == FUNCTION.reference(prompt, 8)


def check_nothing_left_but_cached(loop: EngineLoop) -> dict[str, Any]:
    stats = dict(loop.executor.stats())
    assert (stats["running"], stats["waiting"], stats["preempted"]) == (0, 0, 0)
    assert stats["host_free_pages"] == stats["host_total_pages"]
    return stats
