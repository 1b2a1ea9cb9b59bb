"""Two ranks give the texts of one: no method, policy or depth knows of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from method_cases import (
    DRAFTING,
    GREEDY,
    HOSTED,
    METHODS,
    NETWORKS,
    PROMPTS,
    SAMPLED,
    Folders,
    check,
    counts_of,
    methods,
    open_llm,
    texts_of,
)

from specdec_ext import LLM, SamplingParams, UnsupportedConfigError, UserDrafterConfig, _core
from specdec_ext.parallel.team import Team
from tensor_parallel import started_team
from tiny_models import save_llama


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with started_team() as team:
        yield team


def open_two(models: Folders, method: Any, **options: Any) -> LLM:
    return open_llm(models, method, tensor_parallel_size=2, **options)


@methods([name for name in METHODS if name not in HOSTED])
def test_texts_and_counts(
    team: Team, models: Folders, plain_texts: dict[str, Any], method: str
) -> None:
    params = {"greedy": GREEDY}
    if method != "redrafter-law":
        params["sampled"] = SAMPLED
    counts = []
    for open_it in (open_llm, open_two):
        # Prompts are not cut by what steps take, which differs from run to run.
        with open_it(models, method, scheduler={"max_prefill_slowdown": None}) as llm:
            for law, param in params.items():
                assert texts_of(llm, param) == plain_texts[law]
            counts.append(counts_of(llm))
    assert counts[0] == counts[1]
    assert (counts[1]["num_accepted_tokens"] > 0) == (method in [*DRAFTING, "redrafter-law"])


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": {"max_num_tokens": 17}},
        {"scheduler": {"overlap_depth": 2}},
        {"scheduler": {"policy": "max_utilization", "max_seq_len": 64},
         "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 80}},
        {"scheduler": {"policy": "max_utilization", "max_seq_len": 64},
         "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 80,
                             "host_cache_size": 1 << 26, "host_link_gb_per_s": 1e6}},
        {"kv_cache_config": {"tokens_per_block": 8, "max_tokens": 1600,
                             "enable_block_reuse": True}},
    ],
    ids=["chunks", "depth", "preemption", "swapping", "reuse"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["lookahead", "tree"])
def test_schedules(
    team: Team, models: Folders, plain_texts: dict[str, Any], method: str, options: dict[str, Any]
) -> None:
    with open_two(models, method, **options) as llm:
        for _ in range(2):  # with reuse the second time reads what the first has published
            assert texts_of(llm, GREEDY) == plain_texts["greedy"]
        stats = llm.get_metrics()["executor"]
    if "policy" in options.get("scheduler", {}):
        assert stats["preemptions"] > 0
    if "host_cache_size" in options.get("kv_cache_config", {}):
        assert stats["swapped_in"] == stats["swapped_out"] == stats["preemptions"]
    if "enable_block_reuse" in options.get("kv_cache_config", {}):
        assert stats["cached_tokens"] > 0


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, {"dtype": "float32", "quantization": "int8"},
     {"dtype": "bfloat16", "quantization": "int4"},
     {"dtype": "bfloat16", "quantization": "fp8"},
     {"dtype": "bfloat16", "quantization": "fp8_w8a8"}],
    ids=["bfloat16", "int8", "int4", "fp8", "fp8_w8a8"],
)  # fmt: skip
def test_widths_and_uneven_groups(
    team: Team, tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("uneven")
    save_llama(
        folder, 3, 300, hidden_size=288, intermediate_size=160, num_attention_heads=9,
        num_key_value_heads=3,
    )  # fmt: skip
    found = []
    for ranks in (1, 2):
        settings = {"device": "cpu", "max_batch_size": 3, "max_seq_len": 128, **options}
        with LLM(
            folder, tensor_parallel_size=ranks, speculative_config={"method": "ngram"}, **settings
        ) as llm:
            greedy = dataclasses.replace(GREEDY, return_generation_logits=True)
            outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
            found.append([out.outputs[0].generation_logits.numpy() for out in outputs])
            found[-1] += [np.array(texts_of(llm, SAMPLED))]
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)


class Guesses:
    """Drafts the text that is known, behind a wrong one: accepted drafts move to other places."""

    def __init__(self) -> None:
        self.texts: dict[tuple[int, ...], list[int]] = {}

    def propose(self, history: list[int], budget: int) -> Any:
        text = next(t for p, t in self.texts.items() if tuple(history[: len(p)]) == p)
        chain = text[len(history) : len(history) + 3]
        return ([299, *chain], [-1, -1, *range(1, len(chain))]) if chain else None


@pytest.mark.parametrize("kv", ["int8", "fp8", "float32"])
def test_accepted_drafts_move_with_their_scales(team: Team, tmp_path: Path, kv: str) -> None:
    save_llama(
        tmp_path, 3, 300, hidden_size=288, intermediate_size=192, num_attention_heads=9,
        num_key_value_heads=3,
    )  # fmt: skip
    prompts = [[1 + (7 * i * j) % 250 for i in range(40)] for j in range(1, 4)]
    params = SamplingParams(
        max_tokens=40, temperature=0, ignore_eos=True, return_generation_logits=True
    )
    common: dict[str, Any] = {
        "device": "cpu", "max_batch_size": 3, "max_seq_len": 128, "dtype": "float32",
        "kv_cache_config": {"dtype": kv},
    }  # fmt: skip
    guesses = Guesses()
    with LLM(tmp_path, speculative_config=None, **common) as llm:
        plain = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
    for prompt, output in zip(prompts, plain, strict=True):
        guesses.texts[tuple(prompt)] = [*prompt, *output.token_ids]
    config = UserDrafterConfig(guesses, 7, adaptive=False)
    with LLM(tmp_path, tensor_parallel_size=2, speculative_config=config, **common) as llm:
        found = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
        assert llm.get_metrics()["executor"]["num_accepted_tokens"] > 60
    for one, two in zip(plain, found, strict=True):
        assert one.token_ids == two.token_ids
        np.testing.assert_array_equal(one.generation_logits, two.generation_logits)


@methods(NETWORKS[:1])
def test_the_model_says_what_it_is(team: Team, models: Folders, method: str) -> None:
    with open_llm(models, method) as one, open_two(models, method) as two:
        assert two.model.info.num_kv_heads == one.model.info.num_kv_heads == 2
        assert two.memory.bytes_per_token * 2 == one.memory.bytes_per_token
        assert two.model.info.weight_bytes < 0.7 * one.model.info.weight_bytes
        assert "on 2 ranks" in two.model.info.attention


@methods(["lookahead", "medusa", "tree"])
def test_fast_mode(team: Team, models: Folders, method: str) -> None:
    """Partial sums: other bits than one rank's, and still the text of plain decoding."""
    texts, link = [], team.link
    for spec in (None, method):
        with open_two(models, spec, numerics="fast") as llm:
            before = link._gathers  # type: ignore[attr-defined]
            texts.append(texts_of(llm, GREEDY))
            steps = llm.get_metrics()["num_forward_passes"]
            gathers = link._gathers - before  # type: ignore[attr-defined]
            assert gathers == steps * (2 * llm.model.num_layers + 1)
            assert llm.engine.numerics == "fast"
            check(llm)
    assert texts[0] == texts[1]


def test_reset_reaches_the_other_ranks(team: Team, tmp_path_factory: Any) -> None:
    """Their pages' memory goes back to the system, and is zeros when it is used again."""
    folder = save_llama(tmp_path_factory.mktemp("wide"), 3, 300, head_dim=128, num_hidden_layers=8)
    prompts = [[(7 * i + seed) % 300 for i in range(400)] for seed in range(4)]
    params = dataclasses.replace(GREEDY, max_tokens=4)
    status = Path(f"/proc/{team._processes[0].pid}/status")

    def follower_bytes() -> int:
        return 1024 * int(status.read_text().partition("RssAnon:")[2].split()[0])

    with LLM(folder, tensor_parallel_size=2, device="cpu", speculative_config=None,
             kv_cache_config={"max_tokens": 2048}) as llm:  # fmt: skip
        texts = texts_of(llm, params, prompts)
        held = follower_bytes()
        llm.reset_prefix_cache()
        # Two prompts at least run at once: 8 layers, a head of 128 floats, K and V.
        for _ in range(200):
            if given_back := held - follower_bytes() > 2 * 400 * 8 * 128 * 4 * 2:
                break
            time.sleep(0.05)  # nobody answers this packet
        assert given_back
        assert texts_of(llm, params, prompts) == texts


def test_a_bad_step_is_refused_before_the_ranks_know(team: Team, models: Folders) -> None:
    with open_two(models, None) as llm:
        with pytest.raises(ValueError, match=r"1\.\.1024"):
            llm.model.forward(
                _core.make_step_plan([[1] * 1025], kv_len=[0], page_table=[list(range(129))])
            )
        assert texts_of(llm, GREEDY)


def test_names_of_the_argument(team: Team, models: Folders) -> None:
    with LLM(models["target"], tp_size=2, device="cpu", max_seq_len=64) as llm:
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)
        assert "on 2 ranks" in llm.model.info.attention
    with pytest.raises(UnsupportedConfigError, match="pipeline_parallel_size"):
        LLM(models["target"], tp_size=2, pipeline_parallel_size=2)
