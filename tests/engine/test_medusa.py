"""Medusa decoding: its proposals against the definition, its output against plain decoding."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_models import VOCAB, make_heads, save_heads, save_target
from method_cases import HOST, Where, placed

from reference import medusa_reference as ref
from specdec_ext import (
    LLM,
    ConfigError,
    ExternalDraftTokensConfig,
    MedusaDecodingConfig,
    ModelError,
    RequestError,
    SamplingParams,
)
from specdec_ext._core import StepCost
from specdec_ext.config.methods import published_trees
from specdec_ext.drafters.medusa.heads import save_medusa_heads
from specdec_ext.models.host_arrays import as_torch

COMPARED: list[int] = []


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_heads(tmp_path_factory.mktemp("heads"))


def make_llm(
    target: Path, config: Any = None, batch: int = 3, overlap_depth: int = 0, **kwargs: Any
) -> LLM:
    limits = {"max_batch_size": batch, "max_seq_len": 200, "overlap_depth": overlap_depth}
    return LLM(
        target,
        speculative_config=config,
        scheduler_config=limits,
        **kwargs,
    )


def make_prompts(count: int, seed: int, vocab: int = VOCAB) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.choice([1, 2, 7, 31]))] for _ in range(count)]


def decode(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(out.outputs[0].finish_reason == "length" for out in outputs)
    return [list(out.outputs[0].token_ids) for out in outputs]


# -- what is delivered ----------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4, "hidden_size": 64},
    "mqa-tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "wide-head": {"head_dim": 24, "num_hidden_layers": 1, "initializer_range": 0.5},
}


def check_equal(
    target: Path, plain: list[list[int]], prompts: list[list[int]], config: Any, *, batch: int,
    params: Any, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    with make_llm(target, config, batch, **options) as llm:
        assert decode(llm, prompts, params) == plain
        metrics = llm.get_metrics()
    assert metrics["drafter"]["failures"] == 0
    COMPARED.append(sum(map(len, plain)))
    return metrics


@pytest.mark.parametrize("where", [HOST, Where("stream", 2)], ids=str)
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_output_is_plain_for_published_and_random_trees(
    tmp_path: Path, shape: str, batch: int, where: Where
) -> None:
    hidden = SHAPES[shape].get("hidden_size", 32)
    folder = save_target(tmp_path / "target", seed=len(shape), **SHAPES[shape])
    # Heads that know something: the target's own head behind small blocks guesses repeats.
    save_heads(tmp_path / "heads", hidden=hidden, lm_head="target", scale=0.02, seed=batch)
    rng = random.Random(f"{shape}-{batch}")
    prompts = make_prompts(batch + 3, seed=batch)
    params = SamplingParams(max_tokens=70, ignore_eos=True)
    with make_llm(folder, None, batch) as llm:
        plain = decode(llm, prompts, params)
    trees: list[Any] = list(published_trees()) if batch == 3 else ["mc_sim_7b_63"]
    trees += [[list(n) for n in ref.random_tree(rng, 127, 4, 8)] for _ in range(4)]
    largest = [[i] for i in range(VOCAB - 1)] + [[i, j] for i in range(20) for j in range(4)]
    config = MedusaDecodingConfig(tmp_path / "heads", largest, num_medusa_heads=4)
    options = {"kv_cache_config": {"tokens_per_block": rng.choice([1, 4, 16, 32])}}
    with placed(where):
        llm = make_llm(folder, config, batch, overlap_depth=where.depth, **options)
    with llm:
        for number, tree in enumerate(trees):
            adaptive = number % 3 == 2
            wanted = dataclasses.replace(params, medusa_choices=tree, adaptive=adaptive)
            assert decode(llm, prompts, wanted) == plain, tree
            COMPARED.append(sum(map(len, plain)))
        metrics = llm.get_metrics()
    assert metrics["drafter"]["failures"] == 0
    accepted = metrics["speculative_decoding"]["num_accepted_draft_tokens"]
    assert accepted > 0


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_and_implementations(target: Path, heads: Path, impl: str, dtype: str) -> None:
    prompts, params = make_prompts(4, seed=9), SamplingParams(max_tokens=40, ignore_eos=True)
    options = {"model_impl": impl, "dtype": dtype}
    with make_llm(target, **options) as llm:
        plain = decode(llm, prompts, params)
    for wanted in ("auto", "bfloat16"):
        config = MedusaDecodingConfig(heads, dtype=wanted)
        check_equal(target, plain, prompts, config, batch=3, params=params, **options)


def test_sampling_and_penalties_give_the_text_of_plain_decoding(target: Path, heads: Path) -> None:
    prompts = make_prompts(6, seed=4)
    params = [
        SamplingParams(max_tokens=50, ignore_eos=True, temperature=0.9, seed=7, top_p=0.9),
        SamplingParams(max_tokens=50, ignore_eos=True, temperature=1.3, seed=8, top_k=5),
        SamplingParams(max_tokens=50, ignore_eos=True, repetition_penalty=1.3),
        SamplingParams(max_tokens=50, ignore_eos=True, bad_words=[[3], [5, 6]]),
        SamplingParams(max_tokens=50, ignore_eos=True, logit_bias={4: 5.0}, logprobs=2),
        SamplingParams(max_tokens=50, ignore_eos=True, presence_penalty=0.5, min_tokens=20),
    ]
    with make_llm(target) as llm:
        plain = decode(llm, prompts, params)
    config = MedusaDecodingConfig(heads, "vicuna_7b_stage2")
    check_equal(target, plain, prompts, config, batch=3, params=params)


def test_k_v_after_compaction_are_those_of_plain_decoding(
    target: Path, heads: Path, monkeypatch: Any
) -> None:
    """The pages of a finished request, read through its page table, hold plain decoding's bits."""
    prompt = make_prompts(1, seed=6)[0] * 3
    params = SamplingParams(max_tokens=80, ignore_eos=True)

    def pages_after(config: Any) -> tuple[list[int], list[torch.Tensor]]:
        """Tokens, and K and V [layers, positions, kv heads, head dim] of all but the last."""
        tables: dict[int, list[int]] = {}
        with make_llm(target, config, 1, kv_cache_config={"tokens_per_block": 4}) as llm:
            forward = llm.model.forward

            def watch(plan: Any, *rest: Any) -> Any:
                tables[0] = [int(p) for p in plan.page_table[0] if p >= 0]
                tables[1] = [int(plan.kv_len[0])]
                return forward(plan, *rest)

            llm.model.forward = watch  # type: ignore[method-assign]
            (tokens,) = decode(llm, [prompt], params)
            length = tables[1][0]  # what was compacted before the last step
            gathered = []
            for pages in llm.model._pages:
                chosen = as_torch(pages)[:, tables[0][: -(-length // 4)]]  # [layers, n, G, 4, K]
                flat = chosen.permute(0, 1, 3, 2, 4).flatten(1, 2)
                gathered.append(flat[:, :length].clone())
        return tokens, gathered

    plain, (k, v) = pages_after(None)
    config = MedusaDecodingConfig(heads, "mc_sim_7b_63", adaptive=False)
    tokens, (mk, mv) = pages_after(config)
    assert tokens == plain
    shared = mk.shape[1]
    assert shared >= len(prompt) + 70
    assert torch.equal(k[:, :shared], mk) and torch.equal(v[:, :shared], mv)


def test_acceptance_of_the_configuration(target: Path, heads: Path) -> None:
    """Rejection of one-hot drafts is exact match, token for token; typical is labelled lossy."""
    prompts = make_prompts(4, seed=21)
    sampled = [
        SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=i) for i in range(4)
    ]
    with make_llm(target) as llm:
        plain = decode(llm, prompts, sampled)
    config = MedusaDecodingConfig(heads, acceptance="rejection", adaptive=False)
    check_equal(target, plain, prompts, config, batch=3, params=sampled)
    config = MedusaDecodingConfig(
        heads, acceptance="typical", posterior_threshold=0.05, adaptive=False
    )
    greedy = SamplingParams(max_tokens=60, ignore_eos=True)
    with make_llm(target) as llm:
        plain_greedy = decode(llm, prompts, greedy)
    with make_llm(target, config) as llm:
        outputs = llm.generate(prompts, sampled, use_tqdm=False)
        assert decode(llm, prompts, greedy) == plain_greedy
        strict = [dataclasses.replace(p, acceptance="rejection") for p in sampled]
        assert decode(llm, prompts, strict) == plain
    for output in outputs:
        assert output.metrics["acceptance"] == "typical (lossy)"
        assert output.metrics["lossless"] is False
    lossy = [list(out.outputs[0].token_ids) for out in outputs]
    assert lossy != plain, "it accepts what exact match does not"


def test_a_lossy_default_does_not_decide_about_external_drafts(target: Path, heads: Path) -> None:
    """Without logits they are held against the model's own choice, also by a lossy engine."""
    prompts = make_prompts(4, seed=22)
    config = MedusaDecodingConfig(heads, acceptance="typical", posterior_threshold=0.05)

    def with_drafts(drafts: list[int], i: int, **options: Any) -> SamplingParams:
        return SamplingParams(
            max_tokens=40, ignore_eos=True, temperature=1.0, seed=i,
            external_draft=ExternalDraftTokensConfig(drafts, continue_decoding=True), **options,
        )  # fmt: skip

    free = [
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=i) for i in range(4)
    ]
    with make_llm(target) as llm:
        plain = decode(llm, prompts, free)
    for spoiled in (False, True):
        drafts = [text[:3] + ([(text[3] + 1) % 40] if spoiled else []) for text in plain]
        params = [with_drafts(draft, i) for i, draft in enumerate(drafts)]
        with make_llm(target, config) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            asked = [with_drafts(draft, i, acceptance="typical") for i, draft in enumerate(drafts)]
            lossy = llm.generate(prompts, asked, use_tqdm=False)
        assert [list(out.outputs[0].token_ids) for out in outputs] == plain
        for output in outputs:
            assert output.metrics["acceptance"] == "exact_match"
            assert output.metrics["lossless"] is True
            assert output.outputs[0].token_from_draft[:4] == [True, True, True, False]
        assert all(output.metrics["lossless"] is False for output in lossy)


def test_the_adaptive_budget_drafts_less_where_nothing_is_accepted(
    target: Path, tmp_path: Path
) -> None:
    """Heads that are never right cost nearly nothing once that is known."""
    save_heads(tmp_path, seed=3)
    prompts, params = make_prompts(2, seed=8), SamplingParams(max_tokens=150, ignore_eos=True)
    with make_llm(target, MedusaDecodingConfig(tmp_path)) as llm:
        # A table on which rows are dear: time grows with them.
        cost = StepCost({n: 1e-3 * n for n in (1, 2, 4, 8, 64, 128)})
        llm.engine._calibrate = lambda: llm.engine.executor.set_step_cost(*cost.columns)
        decode(llm, prompts, params)
        stats = llm.get_metrics()
    assert stats["speculative_decoding"]["num_draft_tokens"] < 60 < stats["num_forward_passes"]


def test_requests_choose_their_own_trees(target: Path, heads: Path) -> None:
    prompts = make_prompts(5, seed=12)
    base = {"max_tokens": 40, "ignore_eos": True}
    params = [
        SamplingParams(**base),
        SamplingParams(**base, medusa_choices=[[0, 0, 0, 0]]),
        SamplingParams(**base, medusa_choices=[[i] for i in range(40)], max_draft_len=33),
        SamplingParams(**base, speculative=False),
        SamplingParams(**base, max_draft_len=0),
    ]
    with make_llm(target) as llm:
        plain = decode(llm, prompts, SamplingParams(**base))
    with make_llm(target, MedusaDecodingConfig(heads, adaptive=False)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [list(o.outputs[0].token_ids) for o in outputs] == plain
        most = [
            max(o.metrics["speculative_decoding"]["per_step_drafted"], default=0) for o in outputs
        ]
        assert most == [63, 4, 33, 0, 0]
        for bad, message in (
            ([[i] for i in range(40)] + [[0, i] for i in range(24)], "has 64 choices, .* limit 63"),
            ([[0] * 5], r"choice \[0, 0, 0, 0, 0\] needs 5 heads, there are 4"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.generate([1], SamplingParams(medusa_choices=bad), use_tqdm=False)
        with pytest.raises(RequestError, match=r"choice \[50\] has rank 50, ranks are 0..47"):
            llm.generate([1], SamplingParams(medusa_choices=[[50]]), use_tqdm=False)
    with make_llm(target) as llm, pytest.raises(RequestError, match="no speculative_config"):
        llm.generate([1], SamplingParams(medusa_choices=[[0]]), use_tqdm=False)
    with (
        make_llm(target, {"method": "ngram"}) as llm,
        pytest.raises(RequestError, match="decodes with ngram"),
    ):
        llm.generate([1], SamplingParams(medusa_choices=[[0]]), use_tqdm=False)


def test_heads_are_counted_from_the_tensors(target: Path, tmp_path: Path) -> None:
    save_heads(tmp_path, number=3)
    with make_llm(target, MedusaDecodingConfig(tmp_path)) as llm:
        assert llm.speculative_config.num_medusa_heads == 3
        assert llm.speculative_config.max_draft_path_len == 3
    with make_llm(target, MedusaDecodingConfig(tmp_path, num_medusa_heads=2)) as llm:
        assert llm.speculative_config.max_draft_path_len == 2
    for options, message in (
        ({"num_medusa_heads": 4}, "num_medusa_heads = 4: .* has 3 heads"),
        ({"medusa_choices": [[0, 0, 0, 0]]}, r"choice \[0, 0, 0, 0\] needs 4 heads, there are 3"),
        ({"medusa_choices": [[50]]}, r"choice \[50\] has rank 50, ranks are 0..47"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_llm(target, MedusaDecodingConfig(tmp_path, **options))


def test_heads_that_do_not_fit_are_refused_before_anything_is_decoded(
    target: Path, tmp_path: Path
) -> None:
    nan = make_heads()
    nan.block_linears()[2][0].weight.data[3, 4] = float("nan")
    save_medusa_heads(tmp_path / "nan", nan, dtype="float32")
    save_heads(tmp_path / "hidden", hidden=40)
    save_heads(tmp_path / "vocab", vocab=VOCAB - 1)
    (tmp_path / "pickle").mkdir()
    file = tmp_path / "pickle" / "medusa_lm_head.pt"
    torch.save(dict(make_heads().weights()), file)
    for name, message in (
        ("nan", r"'2\.0\.linear\.weight' holds 1 NaN"),
        ("hidden", "hidden size of 40, the target .* has hidden_size = 32"),
        ("vocab", "vocabulary of 47, the target .* has vocab_size = 48"),
        ("pickle", r"medusa_lm_head\.pt: pickle files can run code and are refused"),
    ):
        with pytest.raises(ModelError, match=message):
            make_llm(target, MedusaDecodingConfig(tmp_path / name))
    prompts, params = make_prompts(2, seed=3), SamplingParams(max_tokens=20, ignore_eos=True)
    with make_llm(target) as llm:
        plain = decode(llm, prompts, params)
    config = MedusaDecodingConfig(tmp_path / "pickle")
    check_equal(target, plain, prompts, config, batch=2, params=params, allow_pickle=True)


def test_enough_tokens_were_compared() -> None:
    """Runs last in this file: the promise is 50,000 over the quick cases."""
    if len(COMPARED) > 40:
        assert sum(COMPARED) >= 50_000
