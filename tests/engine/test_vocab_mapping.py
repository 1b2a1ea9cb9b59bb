"""Draft models with another tokenizer (TLI): drafts, laws, texts, refusals, commands.

What is mapped is held against tests/reference/vocab_mapping_reference.py in
tests/unit/test_shared_tokens.py, scores of a part of the head in tests/model/test_scored_rows.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_draft_target_sampling as sampling
from draft_target_cases import (
    CHAIN,
    GREEDY,
    PROMPTS,
    SAMPLED,
    TREE,
    VOCAB,
    make_model,
    open_llm,
    run,
    tokens_of,
)
from draft_target_cases import folders as folders
from draft_target_cases import plain as plain
from mapped_cases import MAPPED, MAPPED_TREE, WORDS, half_known, renamed, shuffled
from method_cases import HOST, Folders, Where, each_place
from test_draft_target_vocabulary import REJECTION, write_tokenizer

from reference.vocab_mapping_reference import draft_law
from specdec_ext import LLM, ConfigError, DraftTargetDecodingConfig, SamplingParams, _core
from specdec_ext.config.parse import parse_speculative_config
from specdec_ext.drafters.draft_target import host_passes
from specdec_ext.models import load_model

STREAM = Where("stream", 1)
# One of a kind on the slow emulation: drawn chains, and trees.
EMULATED_CASES = [("rejection", CHAIN), ("greedy", TREE)]
KINDS = {"greedy": GREEDY, "sampled": SAMPLED, "rejection": REJECTION}


@pytest.fixture(scope="module")
def pair(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The target with its words, the model near to it with them in another order ("moved"), and
    with three fifths of them ("some")."""
    root = tmp_path_factory.mktemp("mapped")
    target = root / "target"
    shutil.copytree(folders["target"], target)
    write_tokenizer(target, WORDS)
    return {
        "target": target,
        "near": folders["near"],
        "moved": renamed(folders["near"], root / "moved", shuffled(WORDS)),
        "some": renamed(folders["near"], root / "some", half_known()),
    }


def shared_of(pair: Folders) -> set[int]:
    words = json.loads((pair["some"] / "tokenizer.json").read_text())["model"]["vocab"]
    return {token for token, word in enumerate(WORDS) if word in words}


# -- the same drafts ------------------------------------------------------------------------------


@each_place
@pytest.mark.parametrize("specs", [(CHAIN, MAPPED), (TREE, MAPPED_TREE)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_words_at_other_ids_are_drafted_like_those_at_the_same(
    folders: Folders, pair: Folders, specs: tuple[Any, Any], kind: str, where: Where
) -> None:
    """Everything that a draft model says is the same: texts, drafts and what was accepted."""
    if where.device == "cuda-emu-fast" and (kind, specs[0]) not in EMULATED_CASES:
        pytest.skip("half a minute of emulation; the host's and a stream's say as much")
    prompts = PROMPTS if where.device == "cpu" else PROMPTS[:2]
    seen = []
    for models, name, spec in ((folders, "near", specs[0]), (pair, "moved", specs[1])):
        with open_llm(models, name, where=where, spec=spec) as llm:
            texts = run(llm, prompts, KINDS[kind])
            counts = llm.get_metrics()["speculative_decoding"]
        keys = ("num_draft_tokens", "num_accepted_draft_tokens")
        seen.append((texts, [counts[key] for key in keys]))
    assert seen[0] == seen[1]
    assert seen[0][1][1] > 15  # 19 on an H200, whose products are rounded elsewhere


@pytest.mark.parametrize("where", [HOST, STREAM], ids=str)
@pytest.mark.parametrize("spec", [MAPPED, MAPPED_TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("batch", [1, 8])
def test_the_text_is_the_targets_and_drafts_are_words_of_both(
    pair: Folders, plain: dict[str, Any], spec: dict[str, Any], batch: int, where: Where
) -> None:
    n = len(PROMPTS)
    with open_llm(pair, "some", batch, where=where, spec=spec) as llm:
        drafted: set[int] = set()
        if where == HOST:
            watch(llm, drafted)
        assert run(llm, PROMPTS[:n], GREEDY) == plain["greedy"][:n]
        assert run(llm, PROMPTS[:n], SAMPLED) == plain["sampled"][:n]
        metrics = llm.get_metrics()
    assert metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 10
    assert metrics["drafter"]["draft_tokens"] == len(shared_of(pair)) == 38
    assert metrics["drafter"]["vocab_overlap"] == 38 / 64
    if where == HOST:
        assert len(drafted) > 10 and drafted <= shared_of(pair)


def watch(llm: LLM, drafted: set[int]) -> None:
    """Collects the tokens behind the golden one of every step that only decodes."""
    forward = llm.model.forward

    def watched(plan: Any, *rest: Any) -> Any:
        if plan.num_prefill_rows == 0:
            for first, end in itertools.pairwise(plan.cu_rows.tolist()):
                drafted.update(plan.tokens[first + 1 : end].tolist())
        return forward(plan, *rest)

    llm.model.forward = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("where", [HOST, STREAM], ids=str)
def test_a_shared_prefix_is_shared_by_the_draft_model_too(
    pair: Folders, plain: dict[str, Any], adaptive: bool, where: Where
) -> None:
    """One row for one token: pages of a prefix hold both models' K/V, whatever the tokenizers."""
    cache = {"tokens_per_block": 4, "enable_block_reuse": True, "max_tokens": 8000}
    spec = {**MAPPED, "adaptive": adaptive}
    with open_llm(pair, "some", where=where, spec=spec, kv_cache_config=cache) as llm:
        counts = []
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert tokens_of(outputs) == plain["greedy"]
            counts.append(llm.get_metrics()["speculative_decoding"]["num_accepted_draft_tokens"])
        assert sum(output.num_cached_tokens for output in outputs) > 100
    if not adaptive:
        assert counts[1] - counts[0] == counts[0] > 10


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_beside_suffix_decoding(pair: Folders, plain: dict[str, Any], kind: str) -> None:
    sources = ["suffix", {"method": "draft_target", "model": str(pair["some"]), **MAPPED}]
    config = parse_speculative_config(sources)
    scheduler = {"max_batch_size": 3, "max_seq_len": 200}
    with LLM(pair["target"], speculative_config=config, scheduler_config=scheduler) as llm:
        assert run(llm, PROMPTS, KINDS[kind]) == plain[kind]
        assert llm.get_metrics()["drafter"]["num_forward_passes"] > 0


def test_a_model_of_the_adapter_drafts(pair: Folders, plain: dict[str, Any]) -> None:
    spec = {**MAPPED, "model_impl": "transformers"}
    with open_llm(pair, "some", spec=spec) as llm:
        assert llm.draft_model is not None and llm.draft_model.impl == "transformers"
        assert run(llm, PROMPTS[:6], GREEDY) == plain["greedy"][:6]
        assert llm.get_metrics()["speculative_decoding"]["num_accepted_draft_tokens"] > 5


# -- laws -----------------------------------------------------------------------------------------

SMALL = sampling.VOCAB


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A target of five tokens, and near to it a draft model of three of these and five others."""
    root = tmp_path_factory.mktemp("small")
    target = make_model(root / "target", 31, vocab_size=SMALL)
    write_tokenizer(target, [f"w{i}" for i in range(SMALL)])
    draft = renamed(target, root / "draft", half_known(SMALL, 0.6), SMALL, noise=0.25)
    return {"target": target, "draft": draft}


LAW_CASES = pytest.mark.parametrize(
    ("spec", "options"),
    [
        (MAPPED, {"acceptance": "rejection"}),
        ({**MAPPED, "adaptive": True}, {"acceptance": "rejection"}),
        (MAPPED, {"acceptance": "rejection", "use_draft_logits": False}),
        (MAPPED_TREE, {"acceptance": "rejection"}),
        (MAPPED, {}),
    ],
    ids=["q", "adaptive", "one-hot", "tree", "exact-match"],
)


@LAW_CASES
def test_the_output_has_the_targets_law(
    small: Folders, spec: dict[str, Any], options: dict[str, Any]
) -> None:
    sampling.check_law(small, spec, options, 20_000 if options else 5_000)


@pytest.mark.slow
@LAW_CASES
def test_the_output_has_the_targets_law_in_full(
    small: Folders, spec: dict[str, Any], options: dict[str, Any]
) -> None:
    sampling.check_law(small, spec, options, 1_000_000)


def test_a_law_of_other_tokens_is_found_out(
    small: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chi-square of this file has the power to tell."""
    told: Callable[..., Any] = host_passes.HostPasses.draft_probs

    def wrong(self: Any, num_requests: int) -> Any:
        probs = told(self, num_requests)
        if probs is None:
            return None
        return dataclasses.replace(probs, probs=np.roll(probs.probs, 1, axis=-1))

    monkeypatch.setattr(host_passes.HostPasses, "draft_probs", wrong)
    with pytest.raises(AssertionError, match=r"assert .* < "):
        sampling.check_law(small, MAPPED, {"acceptance": "rejection"}, 5_000)


def test_q_is_the_masked_law_of_the_draft_model(
    pair: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sampler is told of each draft, against softmax over dictionaries."""
    words = json.loads((pair["some"] / "tokenizer.json").read_text())["model"]["vocab"]
    paired = {token: words[word] for token, word in enumerate(WORDS) if word in words}
    whole = load_model(pair["some"], max_rows=64, draft=True)
    seen: list[tuple[list[int], np.ndarray]] = []
    told = host_passes.HostPasses.draft_probs

    def keep(self: Any, num_requests: int) -> Any:
        probs = told(self, num_requests)
        if probs is not None and probs.has_probs[0]:
            seen.append((list(text), probs.probs[0, 0].copy()))
        return probs

    monkeypatch.setattr(host_passes.HostPasses, "draft_probs", keep)
    prompt = [t for t in PROMPTS[2] if t in paired]
    text: list[int] = list(prompt)
    params = SamplingParams(
        max_tokens=24, ignore_eos=True, temperature=0.7, seed=3, acceptance="rejection"
    )
    spec = {**MAPPED, "max_draft_len": 1}
    with open_llm(pair, "some", 1, spec=spec) as llm:
        for output in llm.stream(prompt, params):
            text[:] = prompt + list(output.outputs[0].token_ids)
    assert len(seen) > 10
    shape = (whole.num_layers, 16, whole.num_kv_heads, 16, whole.head_dim)
    k, v = (_core.LazyZeros(shape, "float32") for _ in range(2))
    whole.bind_cache(k, v)
    order = sorted(paired)
    reads = [words.get(word) for word in WORDS]
    for history, q in seen:
        if any(reads[token] is None for token in history):
            continue
        ids = [reads[token] for token in history]
        plan = _core.make_step_plan([ids], kv_len=[0], page_table=[list(range(16))])
        scores = np.asarray(whole.forward(plan))[0]
        np.testing.assert_allclose(q, draft_law(scores, paired, VOCAB, 0.7)[order], atol=2e-6)


# -- refusals and commands ------------------------------------------------------------------------


def test_too_small_an_overlap_is_refused_before_weights_are_read(
    folders: Folders, pair: Folders, tmp_path: Path
) -> None:
    draft = renamed(folders["near"], tmp_path / "draft", half_known(share=0.25))
    target = tmp_path / "target"
    shutil.copytree(pair["target"], target)
    for path in (target, draft):
        (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"share 16 tokens: 0\.250 .*at least 0\.5"):
        open_llm({"target": target, "draft": draft}, "draft", spec=MAPPED)


def test_other_words_are_refused_unless_asked_for(pair: Folders, folders: Folders) -> None:
    with pytest.raises(ConfigError, match=r"not the target's.*allow_vocab_mapping=True"):
        open_llm(pair, "some")
    with pytest.raises(ConfigError, match=r"has no tokenizer"):
        open_llm(pair, "near", spec=MAPPED)
    with pytest.raises(ConfigError, match=r"allow_vocab_mapping = 'yes'"):
        DraftTargetDecodingConfig("m", allow_vocab_mapping="yes")  # type: ignore[arg-type]
    config = parse_speculative_config({"model": "m", "use_heterogeneous_vocab": True})
    assert isinstance(config, DraftTargetDecodingConfig) and config.allow_vocab_mapping


@pytest.mark.parametrize("name", ["one", "padded"])
def test_vocabularies_that_need_no_mapping(
    folders: Folders, pair: Folders, plain: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """The same words, or more of them behind the target's last."""
    words = WORDS if name == "one" else [*WORDS, "more", "words"]
    draft = renamed(folders["near"], tmp_path / "draft", words)
    with open_llm({**pair, "draft": draft}, "draft", spec=MAPPED) as llm:
        assert run(llm, PROMPTS[:5], GREEDY) == plain["greedy"][:5]
        overlap = llm.get_metrics()["drafter"]["vocab_overlap"]
    assert overlap == (None if name == "one" else 1.0)


def test_the_command_line(
    pair: Folders, plain: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    from specdec_ext.cli import main

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in PROMPTS[:3]))
    argv = ["generate", "--model", str(pair["target"]), "--max_seq_len", "200",
            "--input_file", str(prompts), "--max_tokens", "40", "--ignore_eos", "--json",
            "--verify"]  # fmt: skip
    draft = ["--draft_model", str(pair["some"])]
    for flag in ("--allow_vocab_mapping", "--use-heterogeneous-vocab"):
        assert main([*argv, *draft, flag]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["token_ids"] for line in lines] == plain["greedy"][:3]
        assert all(line["identical"] for line in lines)
    assert main([*argv, *draft]) == ConfigError.exit_code
    assert "allow_vocab_mapping=True" in capsys.readouterr().err
    assert main([*argv, "--allow-vocab-mapping"]) == 2
    assert "needs --draft-engine-dir or --draft-model" in capsys.readouterr().err
