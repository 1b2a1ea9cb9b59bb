"""Layers with narrow windows give their K/V's memory back while others keep theirs: on the CPU, on
ranks, on devices, with prefix reuse.

Texts are held against an engine whose layers keep everything (its pages are too small to be given
back in parts); what is held against the memory plan, and against what each layer's rows see.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from emulators import EMULATED, devices
from specdec_ext import LLM, SamplingParams, _core
from specdec_ext.engine.follower import HostShare
from specdec_ext.engine.kv_pages import KvPages
from specdec_ext.engine.narrow import held_windows
from specdec_ext.models.host_arrays import as_torch
from specdec_ext.models.place import CPU
from specdec_ext.models.windows import AttentionSpan
from specdec_ext.parallel.team import NARROW
from tensor_parallel import started_team

WINDOW, PAGE = 40, 16
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
PROMPTS = [[(7 * i * i + 3 * seed) % 96 for i in range(1 + 67 * seed)] for seed in range(4)]
GREEDY = SamplingParams(max_tokens=90, ignore_eos=True)
# Copies are always cheaper than reading again.
SINKS = {"sink_token_length": 5}
SWAPS = {"host_cache_size": 1 << 26, "host_link_gb_per_s": 1e6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = Gemma3TextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, sliding_window=WINDOW,
        layer_types=KINDS, max_position_embeddings=2048, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("gemma")
    Gemma3ForCausalLM(config).save_pretrained(path)
    return path


def open_llm(folder: Path, spec: Any = None, *, cache: Any = None, **options: Any) -> LLM:
    scheduler = {"max_batch_size": 3, "max_seq_len": 512, **options.pop("scheduler", {})}
    pages = {"tokens_per_block": PAGE, "max_tokens": 1600, **(cache or {})}
    return LLM(
        folder, speculative_config=spec, dtype="float32", kv_cache_config=pages,
        scheduler_config=scheduler, **{"device": "cpu", **options},
    )  # fmt: skip


def texts_of(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outputs]


# A layer's part of such a page is less than one page of the operating system.
KEPT = {"tokens_per_block": 2}


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with open_llm(folder, cache=KEPT) as llm:
        assert llm.memory.narrow_windows == ()
        return texts_of(llm)


@pytest.fixture(scope="module")
def two_heads(folder: Path) -> Path:
    """For two ranks."""
    torch.manual_seed(5)
    config = Gemma3TextConfig.from_pretrained(folder)
    config.num_key_value_heads = 2
    path = folder.parent / "two"
    Gemma3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"spec": {"method": "lookahead", "adaptive": False}},
        {"spec": {"method": "ngram", "max_draft_len": 4, "adaptive": False}},
        {"scheduler": {"overlap_depth": 2}, "spec": {"method": "ngram", "adaptive": False}},
        {"scheduler": {"max_num_tokens": 33}},
        {"scheduler": {"policy": "max_utilization"}, "cache": {"max_tokens": 320}},
        {"scheduler": {"policy": "max_utilization"}, "cache": {"max_tokens": 320, **SWAPS}},
        {"cache": {"max_attention_window": [1 << 20, 20], "sink_token_length": 3}},
    ],
    ids=["plain", "lookahead", "ngram", "depth", "chunks", "preempted", "swapped", "asked for"],
)
def test_texts(folder: Path, expected: list[list[int]], options: dict[str, Any]) -> None:
    with open_llm(folder, **options) as llm:
        assert any(llm.memory.narrow_windows)
        texts = texts_of(llm)
        stats = llm.get_metrics()["executor"]
        assert (stats["preemptions"] > 0) == ("policy" in options.get("scheduler", {}))
        assert (stats["swapped_in"] > 0) == ("host_cache_size" in options.get("cache", {}))
        assert stats["free_pages"] == stats["total_pages"]
        assert not resident_narrow(llm)
    if "max_attention_window" in options.get("cache", {}):
        with open_llm(folder, cache={**options["cache"], **KEPT}) as llm:
            assert llm.memory.narrow_windows == ()
            expected = texts_of(llm)
    assert texts == expected


def resident_narrow(llm: LLM) -> int:
    """Pages that hold anything for the layers of narrow windows."""
    k, _ = (as_torch(part).numpy() for part in llm.model._pages)  # type: ignore[attr-defined]
    narrow = [layer for layer, window in enumerate(llm.memory.narrow_windows) if window]
    return int(np.any(k[narrow] != 0, axis=(2, 3, 4)).sum())


def test_what_each_layer_holds(folder: Path) -> None:
    with open_llm(folder) as llm:
        assert llm.memory.narrow_windows == (WINDOW, WINDOW, 0, WINDOW)
        assert llm.memory.attention_window == 0
        engine = llm.engine
        state = engine.submit(engine.resolve(PROMPTS[3], GREEDY))
        k, v = (as_torch(part).numpy() for part in llm.model._pages)  # type: ignore[attr-defined]
        steps = 0
        while engine.step() and not state.finished:
            steps += 1
            # The next row's position, and the first block that it sees a token of.
            position = len(PROMPTS[3]) + len(state.token_ids) - 1
            first = max(0, position - WINDOW + 1) // PAGE
            pages = engine.executor.pages(state.rid)
            for layer, kind in enumerate(KINDS):
                sees_from = first if kind == "sliding_attention" else 0
                for block in range(position // PAGE):
                    for part in (k, v):
                        held = bool(np.any(part[layer, pages[block]]))
                        assert held == (block >= sees_from), (layer, block, position)
        assert steps > 60
        assert not resident_narrow(llm)


def test_memory_stays_within_the_plan(folder: Path) -> None:
    """Three layers of four hold a window of a long text, and the plan counts on it."""
    plans = {}
    for kept in (True, False):
        cache = {"max_tokens": 6144, **(KEPT if kept else {})}
        with open_llm(folder, cache=cache, scheduler={"max_seq_len": 2000,
                      "max_num_tokens": 128, "max_batch_size": 1}) as llm:  # fmt: skip
            engine = llm.engine
            prompt = [(5 * i) % 96 for i in range(1800)]
            state = engine.submit(engine.resolve(prompt, GREEDY))
            most = 0
            while not state.finished and engine.step():
                held = sum(part.resident_bytes for part in llm._builder._pools[0].tensors)
                most = max(most, held)
            assert most <= llm.memory.pool_bytes
            plans[kept] = (most, llm.memory.pool_bytes)
    assert plans[False][0] < 0.4 * plans[True][0]
    assert plans[False][1] < 0.4 * plans[True][1]


def test_where_all_layers_keep_theirs(folder: Path) -> None:
    """What a page cannot be given back in, on any rank: as without narrow windows."""
    with open_llm(folder, cache=KEPT) as llm:
        assert llm.memory.narrow_windows == ()
    # Two heads make a whole page, the one that each of two ranks has does not.
    model = SimpleNamespace(num_layers=2, num_kv_heads=2, head_dim=64)
    for size, held in ((1, (8, 0)), (2, ())):
        found = held_windows(
            model, "float32", AttentionSpan(), (8, 0), on_cpu=True, tokens_per_block=8, ranks=size
        )
        assert found == held


@pytest.mark.parametrize("pool", [1600, 640], ids=["roomy", "scarce"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"spec": {"method": "ngram", "max_draft_len": 4, "adaptive": False}},
        {"scheduler": {"policy": "max_utilization"}, "cache": SWAPS},
    ],
    ids=["plain", "ngram", "swapped"],
)
def test_prefix_reuse(folder: Path, options: dict[str, Any], pool: int) -> None:
    """Conversations: each turn's prompt is the text so far and more. What is taken over is read
    through narrow windows, too."""
    options = dict(options)
    cache = {"enable_block_reuse": True, "max_tokens": pool, **options.pop("cache", {})}
    texts = {}
    for reuse in (False, True):
        how = cache if reuse else KEPT
        talks = [list(prompt[-150:]) for prompt in PROMPTS]
        with open_llm(folder, cache=how, **options) as llm:
            assert any(llm.memory.narrow_windows) == reuse
            cached = []
            for _ in range(3):
                outputs = llm.generate(talks, SamplingParams(max_tokens=40, ignore_eos=True),
                                       use_tqdm=False)  # fmt: skip
                for talk, output in zip(talks, outputs, strict=True):
                    cached.append((output.num_cached_tokens, len(talk)))
                    talk += [*output.outputs[0].token_ids, 7, 11]
            texts[reuse] = talks
            if reuse:
                stats = llm.get_metrics()["executor"]
                assert stats["free_pages"] == stats["total_pages"]
                # Texts that are long: far behind the windows.
                found = [hit for hit, length in cached if length > 2 * WINDOW]
                assert (max if pool == 640 else min)(found[2:]) > WINDOW
                assert llm.reset_prefix_cache() > 0
                assert not resident_narrow(llm)
    assert texts[True] == texts[False]


def test_a_cached_text_takes_no_more_than_the_plan(folder: Path) -> None:
    """What nobody sees stays for whoever comes, within the room that the plan has."""
    scheduler = {"max_seq_len": 600, "max_num_tokens": 64, "max_batch_size": 1}
    cache = {"enable_block_reuse": True, "max_tokens": 4096}
    with open_llm(folder, cache=cache, scheduler=scheduler) as llm:
        [parts] = llm.memory.narrow_pages
        assert parts < 20 < llm.memory.num_pages
        for seed in range(6):
            prompt = [(5 * i + seed) % 96 for i in range(500)]
            llm.generate(prompt, GREEDY, use_tqdm=False)
            # Each layer of the narrow window has as many.
            assert resident_narrow(llm) <= parts * 3
        assert resident_narrow(llm) >= (parts - 1) * 3  # one may not be written yet
        stats = llm.get_metrics()["executor"]
        assert stats["cached_pages"] > 5 * parts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"spec": {"method": "ngram", "max_draft_len": 4, "adaptive": False}},
        {"scheduler": {"policy": "max_utilization"}, "cache": {"max_tokens": 320, **SWAPS}},
        {"cache": {"enable_block_reuse": True, "max_tokens": 480}},
    ],
    ids=["plain", "ngram", "swapped", "reuse"],
)
def test_ranks(two_heads: Path, team: Any, options: dict[str, Any]) -> None:
    """Every rank gives back what its layers have left."""
    with open_llm(two_heads, cache=KEPT) as llm:
        expected = texts_of(llm)
    with open_llm(two_heads, tensor_parallel_size=2, **options) as llm:
        assert llm.memory.narrow_windows == (WINDOW, WINDOW, 0, WINDOW)
        assert texts_of(llm) == expected
        assert texts_of(llm) == expected  # over pages that others have used


@pytest.fixture(scope="module")
def team() -> Iterator[Any]:
    with started_team() as team:
        yield team


def test_what_another_rank_holds(two_heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank in this process, fed with rank 0's packets: the same parts are zeros in both."""
    with open_llm(two_heads, cache={"max_tokens": 800}) as llm:
        model = llm.model
        other = HostShare(model, SimpleNamespace(size=2))  # type: ignore[arg-type]
        k, v = (as_torch(part).numpy() for part in model._pages)  # type: ignore[attr-defined]
        other._pages = KvPages(model, k.shape[1], PAGE, CPU)
        narrow = np.array(llm.memory.narrow_windows, dtype=np.int32)
        other.do(NARROW, narrow)
        copies = [as_torch(part).numpy() for part in other._pages.tensors]
        left = 0

        def forward(plan: Any, hidden: Any = None) -> Any:
            nonlocal left
            scratch = _core.StepPlan(max_requests=1, max_rows=1, max_pages_per_request=1)
            scratch.unpack(plan.pack(PAGE))
            left += len(scratch.page_orders)
            assert other._orders is not None
            other._orders.follow(scratch.page_orders)
            for mine, copy in zip((k, v), copies, strict=True):
                assert (np.any(mine != 0, (2, 3, 4)) == np.any(copy != 0, (2, 3, 4))).all()
            result = model_forward(plan, hidden)
            for mine, copy in zip((k, v), copies, strict=True):
                copy[...] = np.where(mine != 0, mine, copy)  # what its pass would have written
            return result

        model_forward = model.forward
        monkeypatch.setattr(model, "forward", forward)
        texts_of(llm)
        assert left > 40


@devices
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"spec": {"method": "ngram", "max_draft_len": 4, "adaptive": False}, "overlap_depth": 2},
        {"spec": {"method": "lookahead", "adaptive": False}, "overlap_depth": 1},
        {"policy": "max_utilization", "cache": {"max_tokens": 224, **SWAPS}},
        {"cache": {"enable_block_reuse": True}, "overlap_depth": 1},
        {"params": SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1),
         "spec": {"method": "ngram", "adaptive": False}},
        {"cache": SINKS, "spec": {"method": "lookahead", "adaptive": False}, "overlap_depth": 1},
        {"cache": {**SINKS, "enable_block_reuse": True}, "overlap_depth": 2},
        {"policy": "max_utilization", "cache": {"max_tokens": 224, **SWAPS, **SINKS}},
    ],
    ids=["plain", "ngram", "lookahead", "swapped", "reuse", "by the host", "sinks", "sinks reused",
         "sinks swapped"],
)  # fmt: skip
def test_devices(folder: Path, device: str, options: dict[str, Any]) -> None:
    """Pools of their own for layers with narrow windows, and tables of those."""
    options = dict(options)
    cache, params = options.pop("cache", {}), options.pop("params", None)
    params = params or SamplingParams(max_tokens=40, ignore_eos=True)
    spec = options.pop("spec", None)
    scheduler = {"max_num_tokens": 32, "max_seq_len": 224, **options}

    def turns(llm: LLM) -> tuple[list[list[int]], list[int]]:
        """Prompts, and then what was said with more behind it: all texts, what was cached."""
        talks, cached = [prompt[:90] for prompt in PROMPTS], []
        for _ in range(2):
            outputs = llm.generate(talks, params, use_tqdm=False)
            cached += [output.num_cached_tokens for output in outputs]
            for talk, output in zip(talks, outputs, strict=True):
                talk += [*output.outputs[0].token_ids, 7, 11]
        return talks, cached

    kept = KEPT | (SINKS if "sink_token_length" in cache else {})
    with open_llm(folder, cache=kept, scheduler={"max_seq_len": 224}) as llm:
        wanted, _ = turns(llm)
    with open_llm(folder, spec, device=device, cache=cache, scheduler=scheduler) as llm:
        assert llm.memory.narrow_windows == (WINDOW, WINDOW, 0, WINDOW)
        [pool] = llm._builder._narrow
        assert pool.layers == (0, 1, 3) and pool.k.shape[:2] == (3, llm.memory.narrow_pages[0])
        assert llm.model._pages[0].shape[0] == 1  # type: ignore[attr-defined]
        texts, cached = turns(llm)
        assert texts == wanted
        assert (max(cached) > 2 * WINDOW) == ("enable_block_reuse" in cache)
        stats = llm.get_metrics()["executor"]
        assert stats["free_pages"] == stats["total_pages"]
        assert (stats["swapped_in"] > 0) == ("host_cache_size" in cache)


@EMULATED
@pytest.mark.parametrize(
    "options",
    [
        {"spec": {"method": "lookahead", "adaptive": False}, "overlap_depth": 1},
        {"policy": "max_utilization", "cache": {"max_tokens": 288, **SWAPS}},
    ],
    ids=["lookahead", "swapped"],
)
def test_devices_of_two_ranks(two_heads: Path, team: Any, options: dict[str, Any]) -> None:
    """Each has pools of its own heads; pages have the same numbers in all."""
    options = dict(options)
    cache, spec = options.pop("cache", {}), options.pop("spec", None)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    scheduler = {"max_num_tokens": 32, "max_seq_len": 256, **options}
    with open_llm(two_heads, cache=KEPT, scheduler={"max_seq_len": 256}) as llm:
        wanted = texts_of(llm, params)
    with open_llm(two_heads, spec, device="cuda-emu-fast", cache=cache, scheduler=scheduler,
                  tensor_parallel_size=2) as llm:  # fmt: skip
        [pool] = llm._builder._narrow
        assert pool.k.shape[2] == llm.model.num_kv_heads == 1
        assert texts_of(llm, params) == wanted
        stats = llm.get_metrics()["executor"]
        assert stats["free_pages"] == stats["total_pages"]
        assert (stats["swapped_in"] > 0) == ("host_cache_size" in cache)


@devices
@pytest.mark.parametrize("limit", [{}, {"max_attention_window": 70}], ids=["own", "all layers"])
def test_sink_tokens_of_the_fast_kernels(folder: Path, device: str, limit: dict[str, Any]) -> None:
    """Drafts and prefix reuse change nothing; the sink tokens do."""
    texts = []
    for spec, sinks, reuse in (
        (None, 5, False),
        ({"method": "lookahead", "adaptive": False}, 5, False),
        ({"method": "ngram", "max_draft_len": 4, "adaptive": False}, 5, True),
        (None, 0, False),
    ):
        cache = {
            "tokens_per_block": PAGE, "max_tokens": 800, "sink_token_length": sinks,
            "enable_block_reuse": reuse, **limit,
        }  # fmt: skip
        scheduler = {"max_batch_size": 3, "max_seq_len": 256, "max_num_tokens": 64}
        with LLM(
            folder, speculative_config=spec, dtype="bfloat16", numerics="exact", device=device,
            kv_cache_config=cache, scheduler_config=scheduler,
        ) as llm:  # fmt: skip
            params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=3.0, seed=5)
            for _ in range(2 if reuse else 1):
                texts.append(texts_of(llm, params))
            stats = llm.get_metrics()["executor"]
            assert (stats["cached_tokens"] > 0) == reuse
            assert stats["free_pages"] == stats["total_pages"]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert texts[0] != texts[4]
