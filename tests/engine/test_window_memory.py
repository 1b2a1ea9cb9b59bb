"""Layers with narrow windows give their K/V's memory back while others keep theirs, on the CPU.

Texts are held against an engine that keeps everything (prefix reuse does); what is held against the
memory plan, and against what each layer's rows see.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from specdec_ext import LLM, SamplingParams
from specdec_ext.models.host_arrays import as_torch
from tensor_parallel import started_team

WINDOW, PAGE = 40, 16
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
PROMPTS = [[(7 * i * i + 3 * seed) % 96 for i in range(1 + 67 * seed)] for seed in range(4)]
GREEDY = SamplingParams(max_tokens=90, ignore_eos=True)


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
        folder, speculative_config=spec, dtype="float32", device="cpu", kv_cache_config=pages,
        scheduler_config=scheduler, **options,
    )  # fmt: skip


def texts_of(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with open_llm(folder, cache={"enable_block_reuse": True}) as llm:
        assert llm.memory.narrow_windows == ()
        return texts_of(llm)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"spec": {"method": "lookahead", "adaptive": False}},
        {"spec": {"method": "ngram", "max_draft_len": 4, "adaptive": False}},
        {"scheduler": {"overlap_depth": 2}, "spec": {"method": "ngram", "adaptive": False}},
        {"scheduler": {"max_num_tokens": 33}},
        {"scheduler": {"policy": "max_utilization"}, "cache": {"max_tokens": 320}},
        {"cache": {"max_attention_window": [1 << 20, 20], "sink_token_length": 3}},
    ],
    ids=["plain", "lookahead", "ngram", "depth", "chunks", "preempted", "asked for"],
)
def test_texts(folder: Path, expected: list[list[int]], options: dict[str, Any]) -> None:
    with open_llm(folder, **options) as llm:
        assert any(llm.memory.narrow_windows)
        texts = texts_of(llm)
        stats = llm.get_metrics()["executor"]
        assert (stats["preemptions"] > 0) == ("policy" in options.get("scheduler", {}))
        assert stats["free_pages"] == stats["total_pages"]
        assert not resident_narrow(llm)
    if "max_attention_window" in options.get("cache", {}):
        with open_llm(folder, cache={**options["cache"], "enable_block_reuse": True}) as llm:
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
    for reuse in (True, False):
        cache = {"enable_block_reuse": reuse, "max_tokens": 6144}
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
            plans[reuse] = (most, llm.memory.pool_bytes)
    assert plans[False][0] < 0.4 * plans[True][0]
    assert plans[False][1] < 0.4 * plans[True][1]


def test_where_all_layers_keep_theirs(folder: Path) -> None:
    """What a page cannot be given back in, and who cannot: as without narrow windows."""
    for cache in ({"tokens_per_block": 2}, {"enable_block_reuse": True}):
        with open_llm(folder, cache=cache) as llm:
            assert llm.memory.narrow_windows == ()
    two_heads = folder.parent / "two"
    if not two_heads.exists():
        config = Gemma3TextConfig.from_pretrained(folder)
        config.num_key_value_heads = 2
        Gemma3ForCausalLM(config).save_pretrained(two_heads)
    with started_team(), open_llm(two_heads, tensor_parallel_size=2) as llm:
        assert llm.memory.narrow_windows == ()
