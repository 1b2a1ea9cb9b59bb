"""ReDrafter in the engine: whatever the drafter, the beams and the batch, the text is plain's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import VOCAB
from redrafter_cases import KINDS, random_drafter, trained_drafter
from safetensors.torch import load_file, save_file

from specdec_ext import (
    LLM,
    ConfigError,
    ModelError,
    ReDrafterDecodingConfig,
    RequestError,
    SamplingParams,
)
from specdec_ext._core import StepCost

HIDDEN = 64
NUM_TOKENS = 44
# Adapter and native, tied and untied heads, biases, norms on q and k, soft caps, sliding windows.
NATIVE = ("llama", "llama_tied", "qwen3", "gemma3")
ADAPTED = ("gpt2", "starcoder2", "olmo2")
SETTINGS = [(1, 1), (1, 5), (2, 3), (5, 5), (10, 1), (3, 2), (25, 5), (127, 1), (1, 127)]
COMPARED: list[int] = []


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def make(folder: Path, config: Any = None, *, batch: int = 16, **kwargs: Any) -> LLM:
    return LLM(
        folder,
        speculative_config=config,
        scheduler_config={"max_batch_size": batch, "max_seq_len": 120},
        kv_cache_config={"tokens_per_block": 8},
        **kwargs,
    )


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **options)


def tokens_of(outputs: Any) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in outputs]


def compare(found: list[list[int]], expected: list[list[int]]) -> None:
    assert found == expected
    COMPARED.append(sum(map(len, found)))


@pytest.mark.parametrize("family", NATIVE + ADAPTED)
def test_greedy_text_is_plain_for_every_network(saved: Any, family: str, tmp_path: Path) -> None:
    """Each kind of network, random, with settings of their own per request, in batches of 16."""
    folder = saved(family).folder
    impl = "native" if family in NATIVE else "transformers"
    texts = prompts(16, 1)
    with make(folder, model_impl=impl) as llm:
        expected = tokens_of(llm.generate(texts, greedy(), use_tqdm=False))
    for seed, kind in enumerate(KINDS):
        drafter = random_drafter(tmp_path / kind, kind, HIDDEN, VOCAB, seed)
        config = ReDrafterDecodingConfig(drafter, 5, 5, adaptive=False)
        rng = random.Random(seed)
        params = [
            greedy(
                redrafter_num_beams=rng.choice([None, 1, 2, 5]),
                redrafter_draft_len_per_beam=rng.choice([None, 1, 3, 5]),
                max_draft_len=rng.choice([None, None, 3, 0]),
                speculative=None,
            )
            for _ in texts
        ]
        with make(folder, config, model_impl=impl) as llm:
            compare(tokens_of(llm.generate(texts, params, use_tqdm=False)), expected)
            metrics = llm.get_metrics()
        assert metrics["drafter"]["failures"] == 0
        assert metrics["speculative_decoding"]["num_draft_tokens"] > 1000


@pytest.fixture(scope="module")
def learnt(saved: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(target, drafter): the drafter has learnt the target's text on the prompts of these tests."""
    target = saved("llama")
    with make(target.folder) as llm:
        outputs = tokens_of(llm.generate(prompts(16), greedy(), use_tqdm=False))
    texts = [p + o for p, o in zip(prompts(16), outputs, strict=True)]
    folder = tmp_path_factory.mktemp("drafter")
    return target.folder, trained_drafter(folder, target.model, texts)


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_every_number_of_beams_and_length(learnt: Any, impl: str, batch: int) -> None:
    """With a drafter that is often right, so that long paths are kept and K/V is moved."""
    target, drafter = learnt
    texts = prompts(16)
    with make(target, model_impl=impl, batch=batch) as llm:
        expected = tokens_of(llm.generate(texts, greedy(), use_tqdm=False))
    lengths = []
    for beams, length in SETTINGS:
        config = ReDrafterDecodingConfig(drafter, beams, length, adaptive=False)
        used = texts if batch == 16 else texts[: 2 * batch]
        with make(target, config, model_impl=impl, batch=batch) as llm:
            outputs = llm.generate(used, greedy(), use_tqdm=False)
            compare(tokens_of(outputs), expected[: len(used)])
            spec = llm.get_metrics()["speculative_decoding"]
        assert spec["num_spec_tokens"] == length
        lengths.append(spec["mean_acceptance_length"])
        # Plain pages again: nothing of the drafts is left.
        for out in outputs:
            assert out.metrics["speculative_decoding"]["num_draft_tokens"] > 0
    assert lengths[SETTINGS.index((1, 1))] > 1.3 and lengths[SETTINGS.index((5, 5))] > 2.0


def test_more_beams_are_never_worse_where_they_only_add(learnt: Any) -> None:
    """Drafts of one beam of length 1 are the argmax; k beams of length 1 its k best tokens."""
    target, drafter = learnt
    accepted = []
    for beams in (1, 2, 8):
        config = ReDrafterDecodingConfig(drafter, beams, 1, adaptive=False)
        with make(target, config) as llm:
            llm.generate(prompts(16), greedy(), use_tqdm=False)
            accepted.append(llm.get_metrics()["speculative_decoding"]["mean_acceptance_length"])
    assert accepted == sorted(accepted)


def test_mixed_requests_in_flight(learnt: Any) -> None:
    """Other beams, other lengths, none, sampled with a seed, with penalties: each as if alone."""
    target, drafter = learnt
    texts = prompts(12)
    params = [
        greedy(),
        greedy(redrafter_num_beams=1, redrafter_draft_len_per_beam=4),
        greedy(redrafter_num_beams=3, redrafter_draft_len_per_beam=1),
        greedy(speculative=False),
        greedy(max_draft_len=2),
        greedy(temperature=0.8, seed=5),
        greedy(temperature=0.7, seed=6, top_p=0.9, redrafter_num_beams=2),
        greedy(repetition_penalty=1.3),
        greedy(max_draft_len=0),
        greedy(temperature=1.5, seed=7, top_k=20),
        SamplingParams(max_tokens=7, ignore_eos=True),
        SamplingParams(max_tokens=1, ignore_eos=True),
    ]
    with make(target, batch=1) as llm:
        expected = [
            tokens_of(
                llm.generate([t], [dataclass_without_drafts(p)], use_tqdm=False)
            )[0]
            for t, p in zip(texts, params, strict=True)
        ]  # fmt: skip
    for greedy_search in (True, False):
        for adaptive in (True, False):
            config = ReDrafterDecodingConfig(
                drafter, 4, 4, greedy_search=greedy_search, adaptive=adaptive
            )
            with make(target, config, batch=5) as llm:
                compare(tokens_of(llm.generate(texts, params, use_tqdm=False)), expected)


def dataclass_without_drafts(params: SamplingParams) -> SamplingParams:
    import dataclasses

    return dataclasses.replace(
        params, speculative=None, max_draft_len=None, redrafter_num_beams=None,
        redrafter_draft_len_per_beam=None,
    )  # fmt: skip


@pytest.mark.parametrize("rows_are_free", [False, True])
def test_an_adaptive_engine_takes_the_rows_that_pay(learnt: Any, rows_are_free: bool) -> None:
    """25 drafts are allowed; by a CPU's times a dozen rows are used, from the first step on."""
    target, drafter = learnt
    slow = {1: 7.6, 2: 8.1, 4: 8.4, 8: 8.8, 11: 9.3, 16: 13.2, 32: 26.0, 64: 51.4, 128: 103.7}
    table = {1: 7.6, 128: 7.6} if rows_are_free else slow
    with make(target) as llm:
        expected = tokens_of(llm.generate(prompts(4), greedy(), use_tqdm=False))
    with make(target, ReDrafterDecodingConfig(drafter, 5, 5), batch=1) as llm:
        executor, forward, rows = llm.engine.executor, llm.model.forward, []
        llm.engine._calibrate = lambda: executor.set_step_cost(*StepCost(table).columns)

        def seen(plan: Any, *rest: Any) -> Any:
            rows.append(plan.num_rows)
            return forward(plan, *rest)

        llm.model.forward = seen  # type: ignore[method-assign]
        first = llm.generate(prompts(4)[:1], greedy(), use_tqdm=False)
        drafts = [count - 1 for count in rows[1:]]  # behind the prompt
        others = llm.generate(prompts(4)[1:], greedy(), use_tqdm=False)
        compare(tokens_of([*first, *others]), expected)
    if rows_are_free:
        assert max(drafts) > 15
    else:
        assert drafts[0] >= 1 and max(drafts) <= 12


def test_streaming(learnt: Any) -> None:
    target, drafter = learnt
    with make(target) as llm:
        expected = tokens_of(llm.generate(prompts(3), greedy(), use_tqdm=False))
    with make(target, {"method": "redrafter", "model": str(drafter), "adaptive": False}) as llm:
        for prompt, text in zip(prompts(3), expected, strict=True):
            pieces = list(llm.stream(prompt, greedy()))
            assert list(pieces[-1].outputs[0].token_ids) == text
            assert 1 < len(pieces) < NUM_TOKENS  # some steps deliver several tokens


def test_bfloat16_target(learnt: Any) -> None:
    target, drafter = learnt
    with make(target, dtype="bfloat16") as llm:
        expected = tokens_of(llm.generate(prompts(6), greedy(), use_tqdm=False))
    config = ReDrafterDecodingConfig(drafter, 4, 4, adaptive=False)
    with make(target, config, dtype="bfloat16") as llm:
        compare(tokens_of(llm.generate(prompts(6), greedy(), use_tqdm=False)), expected)


def test_requests_are_held_against_the_engine(learnt: Any) -> None:
    target, drafter = learnt
    with make(target, ReDrafterDecodingConfig(drafter, 3, 4)) as llm:
        for options, message in (
            (
                {"redrafter_num_beams": 4},
                "redrafter_num_beams = 4 is greater than .* num_beams = 3",
            ),
            ({"redrafter_draft_len_per_beam": 5}, "= 5 is greater than the engine's draft_len_per"),
            ({"max_draft_len": 13}, "max_draft_len = 13 is greater than the engine's 12"),
            ({"lookahead_config": (2, 2, 1)}, "this engine decodes with ReDrafter"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.generate([[1], [2]], greedy(**options), use_tqdm=False)
        assert len(tokens_of(llm.generate([[1]], greedy(), use_tqdm=False))[0]) == NUM_TOKENS
    for engine in (None, {"method": "ngram"}):
        with make(target, engine) as llm, pytest.raises(RequestError, match="redrafter_num_beams"):
            llm.generate([1], greedy(redrafter_num_beams=2), use_tqdm=False)


@pytest.mark.parametrize("kind", ["apple", "reduced", "reduced tied"])
def test_best_beam_says_that_it_is_lossy(saved: Any, kind: str, tmp_path: Path) -> None:
    """Sampled requests of every rule and greedy ones in one batch; only best_beam is lossy."""
    folder = saved("llama").folder
    config = ReDrafterDecodingConfig(
        random_drafter(tmp_path, kind, HIDDEN, VOCAB), 4, 3, adaptive=False
    )
    texts = prompts(6, 9)
    sampled: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0, "seed": 4}
    rules = ["best_beam", "exact_match", "rejection"] * 2
    params = [SamplingParams(acceptance=rule, **sampled) for rule in rules]
    with make(folder) as llm:
        plain = tokens_of(llm.generate(texts, SamplingParams(**sampled), use_tqdm=False))
    with make(folder, config) as llm:
        outputs = llm.generate(texts, params, use_tqdm=False)
        again = llm.generate(texts[:1], params[:1], use_tqdm=False)
        assert tokens_of(again) == tokens_of(outputs[:1])
        stats = llm.get_metrics()["drafter"]
        assert stats["failures"] == 0
        greedy_texts = tokens_of(
            llm.generate(texts, greedy(acceptance="best_beam"), use_tqdm=False)
        )
    for rule, out, expected in zip(rules, outputs, plain, strict=True):
        assert out.metrics["lossless"] is (rule != "best_beam")
        assert ("lossy" in out.metrics["acceptance"]) is (rule == "best_beam")
        if rule != "best_beam":
            assert list(out.outputs[0].token_ids) == expected
    with make(folder) as llm:
        assert tokens_of(llm.generate(texts, greedy(), use_tqdm=False)) == greedy_texts
    refused = pytest.raises(RequestError, match="'best_beam': ReDrafter's rule for its beams")
    with make(folder, {"method": "ngram"}) as llm, refused:
        llm.generate(texts[:1], params[:1], use_tqdm=False)


def other_hidden(folder: Path) -> None:
    random_drafter(folder, "apple", 32, VOCAB)


def other_vocab(folder: Path) -> None:
    random_drafter(folder, "apple", HIDDEN, VOCAB + 1)


def missing_tensor(folder: Path) -> None:
    random_drafter(folder, "apple", HIDDEN, VOCAB)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.2.weight"]
    save_file(tensors, folder / "model.safetensors")


def nan_weights(folder: Path) -> None:
    random_drafter(folder, "apple", HIDDEN, VOCAB)
    tensors = load_file(folder / "model.safetensors")
    tensors["rnn_w.weight"][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors")


def pickled(folder: Path) -> None:
    random_drafter(folder, "apple", HIDDEN, VOCAB)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (other_hidden, "trained for hidden_size = 32, the target has 64"),
        (other_vocab, f"trained for vocab_size = {VOCAB + 1}, the target has {VOCAB}"),
        (missing_tensor, r"lm_head\.2\.weight.* is missing"),
        (nan_weights, r"rnn_w\.weight' holds 1 NaN"),
        (pickled, "pickle checkpoints can run code"),
    ],
)
def test_a_drafter_that_does_not_fit_is_one_error_before_any_request(
    saved: Any, tmp_path: Path, damage: Any, message: str
) -> None:
    damage(tmp_path / "drafter")
    with pytest.raises(ModelError, match=message):
        make(saved("llama").folder, ReDrafterDecodingConfig(tmp_path / "drafter"))


def test_without_a_folder_and_without_a_shipped_drafter(
    saved: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("specdec_ext.drafters.shipped._ROOT", tmp_path)
    with pytest.raises(ConfigError, match=r"no trained weights are shipped.*give the folder"):
        make(saved("llama").folder, ReDrafterDecodingConfig())
    with pytest.raises(ModelError, match="does not exist"):
        make(saved("llama").folder, ReDrafterDecodingConfig("nowhere"))


def test_engine_built_for_the_mode(learnt: Any) -> None:
    target, drafter = learnt
    config = ReDrafterDecodingConfig(drafter, 3, 4)
    mode = "explicit_draft_tokens"
    with make(target, config, speculative_decoding_mode=mode, max_draft_len=12) as llm:
        assert llm.memory.max_draft_len == 12
    with pytest.raises(ConfigError, match="max_draft_len = 11 but ReDrafter with max_draft_len"):
        make(target, config, max_draft_len=11)


def test_the_number_of_compared_tokens() -> None:
    """Runs last: what this file promises (skipped when only a part of it ran)."""
    if len(COMPARED) < 90:
        pytest.skip("the file ran in part")
    assert sum(COMPARED) > 50_000
