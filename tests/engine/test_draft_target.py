"""Draft-target decoding: the target's text, whatever the draft model says or does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draft_target_cases import (
    CHAIN,
    DRAFTS,
    GREEDY,
    PROMPTS,
    SAMPLED,
    TREE,
    assert_pages_returned,
    drafter_of,
    open_llm,
    tokens_of,
)
from draft_target_cases import folders as folders
from draft_target_cases import plain as plain

from specdec_ext import (
    RequestError,
    SamplingParams,
)


@pytest.mark.parametrize(("draft", "batch", "spec"), [
    *[(draft, 16, spec) for draft in DRAFTS for spec in (CHAIN, TREE)],
    *[(draft, 1, spec) for draft in ("near", "far") for spec in (CHAIN, TREE)],
    *[(draft, 3, spec) for draft in ("target", "near", "deep")
      for spec in ({}, {**TREE, "adaptive": True})],
])  # fmt: skip
def test_the_output_is_that_of_plain_decoding(
    folders: dict[str, Path], plain: dict[str, Any], draft: str, batch: int, spec: dict[str, Any]
) -> None:
    n = 4 if batch == 1 else len(PROMPTS)
    with open_llm(folders, draft, batch, spec=spec) as llm:
        assert tokens_of(llm.generate(PROMPTS[:n], GREEDY, use_tqdm=False)) == plain["greedy"][:n]
        outputs = llm.generate(PROMPTS[:n], SAMPLED, use_tqdm=False)
        assert tokens_of(outputs) == plain["sampled"][:n]
        assert llm.get_metrics()["drafter"]["failures"] == 0
        assert_pages_returned(llm)


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_target_and_draft_may_differ_in_type_and_implementation(
    folders: dict[str, Path], dtype: str, impl: str
) -> None:
    with open_llm(folders, None, dtype="bfloat16") as llm:
        expected = tokens_of(llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False))
    spec = {**CHAIN, "dtype": dtype, "model_impl": impl}
    with open_llm(folders, "target", spec=spec, dtype="bfloat16") as llm:
        assert tokens_of(llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)) == expected
        assert llm.get_metrics()["speculative_decoding"]["num_accepted_draft_tokens"] > 50


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [1, 4, 7])
def test_a_draft_model_equal_to_the_target_is_right_every_time(
    folders: dict[str, Path], plain: dict[str, Any], params: SamplingParams, length: int
) -> None:
    """Sampled drafts are drawn with the number that the target draws with."""
    spec = {**CHAIN, "max_draft_len": length}
    with open_llm(folders, "target", spec=spec) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        metrics = llm.get_metrics()["speculative_decoding"]
    assert tokens_of(outputs) == plain["greedy" if params is GREEDY else "sampled"]
    assert metrics["num_accepted_draft_tokens"] == metrics["num_draft_tokens"]
    steps = -(-39 // (length + 1))  # the first token comes from the prompt's own pass
    assert [out.metrics["num_forward_passes"] for out in outputs] == [1 + steps] * len(PROMPTS)


def test_a_tree_brings_more_than_its_chain(folders: dict[str, Path]) -> None:
    passes = {}
    for name, spec in (("chain", CHAIN), ("tree", {**TREE, "max_draft_len": 16})):
        with open_llm(folders, "near", spec=spec) as llm:
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        passes[name] = sum(out.metrics["num_forward_passes"] for out in outputs)
    assert passes["tree"] < passes["chain"] < 40 * len(PROMPTS)


# -- scarcity and faults --------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("tokens", [4, 72, 120])
def test_a_request_without_pages_goes_on_plainly(
    folders: dict[str, Path], plain: dict[str, Any], tokens: int, spec: dict[str, Any]
) -> None:
    spec = {**spec, "max_kv_tokens": tokens}
    with open_llm(folders, "near", spec=spec, kv_cache_config={"tokens_per_block": 4}) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        drafts = llm.get_metrics()["speculative_decoding"]["num_draft_tokens"]
        assert tokens_of(outputs) == plain["greedy"]
        assert drafts < 10 if tokens == 4 else drafts > 20
        assert_pages_returned(llm)


def test_texts_beyond_the_draft_models_positions_go_on_plainly(
    folders: dict[str, Path], plain: dict[str, Any]
) -> None:
    with open_llm(folders, "short") as llm:
        outputs = llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == plain["greedy"][:4]
    assert [out.metrics["speculative_decoding"]["num_draft_tokens"] > 0 for out in outputs] == [
        True, True, True, True,
    ]  # fmt: skip


def test_a_cancelled_request_returns_its_pages(
    folders: dict[str, Path], plain: dict[str, Any]
) -> None:
    with open_llm(folders, "near") as llm:
        groups = llm._submit_all([(None, p) for p in PROMPTS[:3]], GREEDY)
        for _ in range(4):
            llm.engine.step()
        groups[1].cancel()
        llm.engine.run([s for g in (groups[0], groups[2]) for s in g.states])
        outputs = [groups[i].snapshot() for i in (0, 2)]
        assert tokens_of(outputs) == [plain["greedy"][0], plain["greedy"][2]]
        assert_pages_returned(llm)
        for output in (next(llm.stream(PROMPTS[0], GREEDY)),):
            assert not output.finished
    assert_pages_returned(llm)


def test_nan_scores_of_the_draft_model_end_the_draft(
    folders: dict[str, Path], plain: dict[str, Any]
) -> None:
    with open_llm(folders, "near", spec={**CHAIN, "min_confidence": 0.01}) as llm:
        drafter = drafter_of(llm)
        forward = drafter.model.forward

        def poisoned(plan: Any) -> Any:
            scores = forward(plan)
            scores[:, 3] = float("nan")
            return scores

        drafter.model.forward = poisoned
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert tokens_of(outputs) == plain["greedy"]
        assert llm.get_metrics()["speculative_decoding"]["num_draft_tokens"] == 0
        assert_pages_returned(llm)


# -- per request ----------------------------------------------------------------------------------


def test_requests_with_and_without_drafts_share_steps(
    folders: dict[str, Path], plain: dict[str, Any]
) -> None:
    def params(**kwargs: Any) -> SamplingParams:
        return SamplingParams(max_tokens=40, ignore_eos=True, **kwargs)

    each = [
        params(),
        params(speculative=False),
        SamplingParams.from_dict({"max_tokens": 40, "ignore_eos": True, "num_draft_tokens": 2}),
        params(max_draft_len=0),
        params(use_draft_logits=False),
    ]
    with open_llm(folders, "target", batch=5) as llm:
        outputs = llm.generate(PROMPTS[:5], each, use_tqdm=False)
        with pytest.raises(RequestError, match="max_draft_len = 5 is greater than the engine's 4"):
            llm.generate([1], params(max_draft_len=5), use_tqdm=False)
        with pytest.raises(RequestError, match="use_draft_logits = True with acceptance"):
            llm.generate([1], params(use_draft_logits=True, temperature=1.0), use_tqdm=False)
        streamed = [
            token
            for out in llm.stream(PROMPTS[0], params())
            for token in out.outputs[0].delta_token_ids
        ]
    assert tokens_of(outputs) == plain["greedy"][:5]
    assert streamed == plain["greedy"][0]
    passes = [out.metrics["num_forward_passes"] for out in outputs]
    assert passes == [1 + 8, 40, 1 + 13, 40, 1 + 8]
    with (
        open_llm(folders, None) as llm,
        pytest.raises(RequestError, match="use_draft_logits = True: this engine has no draft"),
    ):
        llm.generate([1], params(use_draft_logits=True), use_tqdm=False)


def test_min_confidence_ends_a_chain(folders: dict[str, Path], plain: dict[str, Any]) -> None:
    drafted = []
    for floor in (0.0, 0.5, 1.0):
        with open_llm(folders, "near", spec={**CHAIN, "min_confidence": floor}) as llm:
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert tokens_of(outputs) == plain["greedy"]
            drafted.append(llm.get_metrics()["speculative_decoding"]["num_draft_tokens"])
    assert drafted[0] > drafted[1] > drafted[2] > 0
