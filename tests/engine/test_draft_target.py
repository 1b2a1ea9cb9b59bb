"""Draft-target decoding: the target's text whatever the draft model, and its K/V kept right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_ext import (
    LLM,
    ConfigError,
    DraftTargetDecodingConfig,
    ModelError,
    RequestError,
    SamplingParams,
    _core,
)
from specdec_ext.models import load_model

VOCAB = 64
PROMPTS = [
    [5, 9, 2, 9, 2, 9],
    [7],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5],
    list(range(40, 10, -1)),
    *[[(7 * i + 3 * j) % VOCAB for j in range(1 + 5 * i)] for i in range(1, 13)],
]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, top_p=0.95, seed=5)
CHAIN: dict[str, Any] = {"max_draft_len": 4, "adaptive": False}
DRAFTS = ("target", "near", "far", "deep", "short")
TREE: dict[str, Any] = {"max_draft_len": 9, "top_k": 3, "max_draft_depth": 4, "adaptive": False}


def make_model(path: Path, seed: int, **shape: Any) -> Path:
    """A random Llama that repeats itself now and then, as text does."""
    torch.manual_seed(seed)
    config = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        **shape,
    }
    LlamaForCausalLM(
        LlamaConfig(
            **config,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            initializer_range=0.3,
            dtype="float32",
        )
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    target = make_model(root / "target", 11)
    # Close to the target: right often, and often wrong.
    near = root / "near"
    shutil.copytree(target, near)
    weights = load_file(near / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    noisy = {
        name: w + 0.03 * torch.randn(w.shape, generator=generator) for name, w in weights.items()
    }
    save_file(noisy, near / "model.safetensors", metadata={"format": "pt"})
    return {
        "target": target,
        "near": near,
        "far": make_model(root / "far", 12, hidden_size=16, num_hidden_layers=1,
                          num_attention_heads=2, num_key_value_heads=1),
        "deep": make_model(root / "deep", 13, hidden_size=64, num_hidden_layers=3,
                           num_attention_heads=4, num_key_value_heads=4),
        "short": make_model(root / "short", 14, max_position_embeddings=32),
    }  # fmt: skip


def open_llm(folders: dict[str, Path], draft: str | None, batch: int = 3, **kwargs: Any) -> LLM:
    spec = kwargs.pop("spec", CHAIN)
    scheduler = {"max_batch_size": batch, "max_seq_len": 200, **kwargs.pop("scheduler", {})}
    config = None
    if draft is not None:
        config = DraftTargetDecodingConfig(folders[draft], **spec)
    return LLM(folders["target"], speculative_config=config, scheduler_config=scheduler, **kwargs)


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in outputs]


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    with open_llm(folders, None) as llm:
        return {
            "greedy": tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)),
            "sampled": tokens_of(llm.generate(PROMPTS, SAMPLED, use_tqdm=False)),
        }


def drafter_of(llm: LLM) -> Any:
    return llm.engine._drafting.drafter


def assert_pages_returned(llm: LLM) -> None:
    runner = drafter_of(llm).runner
    runner.check_integrity()
    assert runner.free_pages == runner.total_pages


# -- the output is the target's -------------------------------------------------------------------


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
        metrics = llm.get_metrics()
        assert metrics["drafter"]["failures"] == metrics["drafter"]["refused_proposals"] == 0
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


# -- the draft model's K/V ------------------------------------------------------------------------


def rebuilt(model: Any, tokens: Sequence[int], page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [layers, tokens, heads, head_dim] of a text read from its start."""
    pages = -(-len(tokens) // page_size)
    shape = (model.num_layers, pages, model.num_kv_heads, page_size, model.head_dim)
    k, v = torch.zeros(shape, dtype=model.kv_dtype), torch.zeros(shape, dtype=model.kv_dtype)
    model.bind_cache(k, v)
    model.forward(_core.make_step_plan([list(tokens)], kv_len=[0], page_table=[list(range(pages))]))
    return gathered(k, v, list(range(pages)), len(tokens))


def gathered(
    k: torch.Tensor, v: torch.Tensor, pages: list[int], length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(  # type: ignore[return-value]
        pool[:, pages].transpose(2, 3).flatten(1, 2)[:, :length] for pool in (k, v)
    )


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("page", [1, 4, 32])
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("draft", ["target", "near", "far"])
def test_after_every_round_the_kv_is_that_of_the_text_read_afresh(
    folders: dict[str, Path],
    plain: dict[str, Any],
    draft: str,
    spec: dict[str, Any],
    page: int,
    reuse: bool,
) -> None:
    """Bit for bit, in both pools, after partial and after full acceptance."""
    cache = {"tokens_per_block": page, "enable_block_reuse": reuse}
    with open_llm(folders, draft, spec=spec, kv_cache_config=cache) as llm:
        drafter = drafter_of(llm)
        scratch = load_model(folders[draft], draft=True)
        target_scratch = load_model(folders["target"])
        kept: list[int] = []
        follow, forward = drafter._follow, llm.model.forward

        def checked(request: Any) -> Any:
            state = follow(request)
            if state is None or len(request.tokens) == request.prompt_len + 1:
                return state
            cached = drafter.runner.cached(state.slot)
            # All but the golden token and, after full acceptance, the last draft.
            if request.num_drafted:
                assert len(request.tokens) - 2 <= cached <= len(request.tokens) - 1
            kept.append(request.num_accepted)
            pages = drafter.runner.pages(state.slot)
            mine = gathered(*drafter._pages, pages, cached)
            fresh = rebuilt(scratch, request.tokens[:cached], page)
            assert torch.equal(mine[0], fresh[0])
            assert torch.equal(mine[1], fresh[1])
            drafter.runner.check_integrity()
            return state

        def target_checked(plan: Any, hidden: Any = None) -> Any:
            for b, request in enumerate(decoding(llm, plan)):
                if request is not None:
                    length = int(plan.kv_len[b])
                    assert length == len(request.tokens) - 1
                    mine = gathered(*llm._pages, plan.page_table[b].tolist(), length)
                    fresh = rebuilt(target_scratch, request.tokens[:length], page)
                    assert torch.equal(mine[0], fresh[0])
                    assert torch.equal(mine[1], fresh[1])
            return forward(plan) if hidden is None else forward(plan, hidden)

        drafter._follow = checked
        llm.model.forward = target_checked  # type: ignore[method-assign]
        outputs = llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False)
        assert_pages_returned(llm)
    assert tokens_of(outputs) == plain["greedy"][:6]
    assert len(kept) > 40
    if draft == "target":  # all of a chain; the best nine nodes are not always four deep
        assert kept.count(4 if spec is CHAIN else 2) > 20
    if draft == "near":
        assert {0, 1, 2} < set(kept)


def decoding(llm: LLM, plan: Any) -> list[Any]:
    """For each request of the plan the drafting session's record of it; None in its prompt."""
    records = list(llm.engine._drafting._requests.values())
    found = []
    for b in range(plan.num_requests):
        first, length = int(plan.cu_rows[b]), int(plan.kv_len[b])
        golden = int(plan.tokens[first])
        fits = [
            r
            for r in records
            if len(r.tokens) == length + 1
            and r.tokens[-1] == golden
            and llm.engine.executor.decoding(r.request_id)
        ]
        found.append(fits[0] if len(fits) == 1 else None)
    return found


def test_prompts_are_read_in_pieces_while_others_decode(
    folders: dict[str, Path], plain: dict[str, Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr("specdec_ext.drafters.draft_target._PREFILL_ROWS", 20)
    long = [(5 * i + 1) % VOCAB for i in range(150)]
    with open_llm(folders, None) as llm:
        expected = tokens_of(llm.generate([long], GREEDY, use_tqdm=False))[0]
    with open_llm(folders, "target") as llm:
        drafter, rows = drafter_of(llm), []
        forward = drafter.model.forward

        def counted(plan: Any) -> Any:
            rows.append(plan.num_rows)
            return forward(plan)

        drafter.model.forward = counted
        outputs = llm.generate([*PROMPTS[:2], long], GREEDY, use_tqdm=False)
        assert tokens_of(outputs) == [*plain["greedy"][:2], expected]
        assert 20 < max(rows) <= 20 + 2 * 6
        # While its prompt is being read it goes on plainly, then it drafts.
        passes = outputs[2].metrics["num_forward_passes"]
        assert 1 + 8 < passes <= 20


def test_a_warm_prompt_is_not_read_again(folders: dict[str, Path], plain: dict[str, Any]) -> None:
    cache = {"tokens_per_block": 4, "enable_block_reuse": True}
    with open_llm(folders, "near", kv_cache_config=cache) as llm:
        for salt in ("a", "b"):
            params = SamplingParams(max_tokens=40, ignore_eos=True, cache_salt=salt)
            before = drafter_of(llm).stats()
            cold = tokens_of(llm.generate([PROMPTS[3]], params, use_tqdm=False))
            middle = drafter_of(llm).stats()
            warm = tokens_of(llm.generate([PROMPTS[3]], params, use_tqdm=False))
            after = drafter_of(llm).stats()
            assert cold == warm == [plain["greedy"][3]]
            # The other salt's pages are nobody's business.
            assert middle["reused_pages"] == before["reused_pages"]
            assert after["reused_pages"] - middle["reused_pages"] >= 28 // 4
            assert (middle["rows"] - before["rows"]) - (after["rows"] - middle["rows"]) >= 28
        assert_pages_returned(llm)


# -- scarcity and faults --------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("tokens", [4, 24, 72, 120])
def test_a_request_without_pages_goes_on_plainly(
    folders: dict[str, Path], plain: dict[str, Any], tokens: int, spec: dict[str, Any]
) -> None:
    spec = {**spec, "max_kv_tokens": tokens}
    with open_llm(folders, "near", spec=spec, kv_cache_config={"tokens_per_block": 4}) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        stats = llm.get_metrics()["drafter"]
        assert tokens_of(outputs) == plain["greedy"]
        assert stats["total_pages"] == -(-tokens // 4)
        assert stats["rounds_without_pages"] > 0
        assert stats["num_drafts"] < 10 if tokens == 4 else stats["num_drafts"] > 20
        assert_pages_returned(llm)


def test_texts_beyond_the_draft_models_positions_go_on_plainly(
    folders: dict[str, Path], plain: dict[str, Any]
) -> None:
    with open_llm(folders, "short") as llm:
        outputs = llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
        stats = llm.get_metrics()["drafter"]
    assert tokens_of(outputs) == plain["greedy"][:4]
    assert stats["rounds_beyond_positions"] > 20
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
        assert drafter_of(llm).runner.free_pages < drafter_of(llm).runner.total_pages
        groups[1].cancel()
        llm.engine.run([s for g in (groups[0], groups[2]) for s in g.states])
        outputs = [groups[i].snapshot() for i in (0, 2)]
        assert tokens_of(outputs) == [plain["greedy"][0], plain["greedy"][2]]
        assert_pages_returned(llm)
        for output in (next(llm.stream(PROMPTS[0], GREEDY)),):
            assert not output.finished
    assert_pages_returned(llm)


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_draft_model_that_raises_costs_its_step_the_drafts(
    folders: dict[str, Path], plain: dict[str, Any], spec: dict[str, Any]
) -> None:
    with open_llm(folders, "near", spec=spec) as llm:
        drafter, calls = drafter_of(llm), 0
        forward = drafter.model.forward

        def fails(plan: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 3 == 0:
                forward(plan)  # it had written into its pages
            if calls % 3 != 1:
                raise RuntimeError("broken on purpose")
            return forward(plan)

        drafter.model.forward = fails
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert tokens_of(outputs) == plain["greedy"]
        assert llm.get_metrics()["drafter"]["failures"] > 10
        drafter.model.forward = forward
        assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == plain["greedy"]
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
        assert llm.get_metrics()["drafter"]["num_drafts"] == 0
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


# -- vocabularies ---------------------------------------------------------------------------------


def reduced(folders: dict[str, Path], path: Path, ids: list[int], tied: bool) -> Path:
    """The target as its own draft model, its head cut to `ids` in a shuffled order."""
    shutil.copytree(folders["target"], path)
    order = torch.tensor(ids)[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))]
    weights = load_file(path / "model.safetensors")
    if tied:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        del weights["lm_head.weight"]
    else:
        weights["lm_head.weight"] = weights["lm_head.weight"][order].clone()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    save_file({"token_ids": order.to(torch.int32)}, path / "draft_vocab.safetensors")
    return path


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_head_of_all_tokens_in_another_order_is_the_whole_head(
    folders: dict[str, Path], plain: dict[str, Any], tmp_path: Path, params: SamplingParams,
    spec: dict[str, Any],
) -> None:  # fmt: skip
    path = reduced(folders, tmp_path / "draft", list(range(VOCAB)), tied=False)
    with open_llm({**folders, "draft": path}, "draft", spec=spec) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        metrics = llm.get_metrics()["speculative_decoding"]
    assert tokens_of(outputs) == plain["greedy" if params is GREEDY else "sampled"]
    if spec is CHAIN:
        assert metrics["num_accepted_draft_tokens"] == metrics["num_draft_tokens"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_reduced_head_drafts_its_tokens_alone(
    folders: dict[str, Path], plain: dict[str, Any], tmp_path: Path, tied: bool
) -> None:
    ids = [t for t in range(VOCAB) if t % 3]
    path = reduced(folders, tmp_path / "draft", ids, tied)
    with open_llm({**folders, "draft": path}, "draft") as llm:
        drafted: set[int] = set()
        propose = drafter_of(llm).propose

        def watched(requests: Any) -> Any:
            proposals = propose(requests)
            drafted.update(t for p in proposals if p is not None for t in p.tokens)
            return proposals

        drafter_of(llm).propose = watched
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        accepted = llm.get_metrics()["speculative_decoding"]["num_accepted_draft_tokens"]
    assert tokens_of(outputs) == plain["greedy"]
    assert drafted
    assert drafted <= set(ids)
    if not tied:
        assert accepted > 100
        with pytest.raises(ModelError, match="scores 42 of 64 tokens"):
            LLM(path)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1, 1], dtype=torch.int32), "an id twice"),
        (torch.tensor([1, VOCAB], dtype=torch.int32), "token_ids holds 64, the model's ids are"),
        (torch.tensor([-1, 2], dtype=torch.int32), "token_ids holds -1"),
        (torch.tensor([1.0, 2.0]), "expected int32"),
        (torch.tensor([[1]], dtype=torch.int32), "expected int32"),
        (torch.tensor([1, 2], dtype=torch.int32), "lm_head.weight"),
    ],
)
def test_a_damaged_token_list_is_refused(
    folders: dict[str, Path], tmp_path: Path, ids: torch.Tensor, message: str
) -> None:
    path = tmp_path / "draft"
    shutil.copytree(folders["target"], path)
    save_file({"token_ids": ids}, path / "draft_vocab.safetensors")
    with pytest.raises(ModelError, match=message):
        open_llm({**folders, "draft": path}, "draft")


def write_tokenizer(path: Path, words: list[str]) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0])
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model)).save_pretrained(path)


@pytest.mark.parametrize("size", [VOCAB - 5, VOCAB + 8])
def test_vocabularies_may_differ_in_their_padding(
    folders: dict[str, Path], plain: dict[str, Any], tmp_path: Path, size: int
) -> None:
    target = tmp_path / "target"
    shutil.copytree(folders["target"], target)
    draft = make_model(tmp_path / "draft", 21, vocab_size=size)
    pair = {"target": target, "draft": draft}
    with pytest.raises(ConfigError, match=f"has {size} tokens, the target's {VOCAB}"):
        open_llm(pair, "draft")
    words = [f"w{i}" for i in range(VOCAB - 5)]
    write_tokenizer(target, words)
    write_tokenizer(draft, words)
    for params, kind in ((GREEDY, "greedy"), (SAMPLED, "sampled")):
        with open_llm(pair, "draft") as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            assert llm.get_metrics()["drafter"]["failures"] == 0
        assert tokens_of(outputs) == plain[kind]


def test_other_words_are_refused_with_the_first_that_differs(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    shutil.copytree(folders["target"], target)
    shutil.copytree(folders["far"], draft)
    words = [f"w{i}" for i in range(VOCAB)]
    write_tokenizer(target, words)
    write_tokenizer(draft, [*words[:17], "other", *words[18:]])
    message = r"target 64 \(64 words\), draft 64 .*id 17: target 'w17', draft 'other'"
    with pytest.raises(ConfigError, match=message):
        open_llm({"target": target, "draft": draft}, "draft")


# -- memory ---------------------------------------------------------------------------------------


def test_both_models_pages_are_in_one_plan(folders: dict[str, Path]) -> None:
    with open_llm(folders, "deep", kv_cache_config={"tokens_per_block": 16}) as llm:
        memory = llm.get_metrics()["memory"]
        pages = [pool.numel() * pool.element_size() for pool in drafter_of(llm)._pages]
    assert memory["draft_num_pages"] == memory["num_pages"]
    assert memory["draft_bytes_per_token"] == 2 * 3 * 4 * 16 * 4
    assert memory["draft_pool_bytes"] == sum(pages)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_broken_draft_model_is_refused(
    folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "draft"
    shutil.copytree(folders["far"], path)
    (path / name).unlink()
    with pytest.raises(ModelError, match="draft"):
        open_llm({**folders, "draft": path}, "draft")
    with pytest.raises(ModelError, match="nowhere"):
        open_llm({**folders, "draft": tmp_path / "nowhere"}, "draft")


def test_the_command_line_decodes_and_inspects(
    folders: dict[str, Path], plain: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    from specdec_ext.cli import main

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in PROMPTS[:3]))
    engine = ["--model", str(folders["target"]), "--draft_model", str(folders["near"]),
              "--max_draft_len", "3", "--max_seq_len", "200"]  # fmt: skip
    argv = ["generate", *engine, "--input_file", str(prompts), "--max_tokens", "40",
            "--ignore_eos", "--json", "--verify"]  # fmt: skip
    assert main(argv) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["token_ids"] for line in lines] == plain["greedy"][:3]
    assert all(line["identical"] for line in lines)
    assert main(["inspect", *engine, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["draft_model"]["path"] == str(folders["near"])
    assert report["memory"]["draft_pool_bytes"] == report["memory"]["pool_bytes"] > 0
    assert report["speculation"]["max_draft_len"] == 3
    assert main(["inspect", *engine]) == 0
    assert "draft_pool_bytes" in capsys.readouterr().out
