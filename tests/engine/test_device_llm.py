"""LLM(device=...): every drafter on a device gives what plain decoding gives, on it and on the CPU.

Tiny models in float32: on the emulation (tests/simt) everywhere, on a GPU where there is one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from device_llm_cases import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    open_llm,
    plain_texts,
    save_models,
    tokens_of,
)

from emulators import EMULATED, devices
from specdec_ext import (
    ConfigError,
    DraftTargetDecodingConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
    UnsupportedModelError,
    ops,
)
from specdec_ext.models.device_decoder import EXACT_DRAFT_DEPTH


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    return plain_texts(folders)


def drafters(folders: dict[str, Path]) -> dict[str, Any]:
    target = str(folders["target"])
    return {
        "lookahead": LookaheadDecodingConfig(4, 3, 4, adaptive=False),
        "draft tree": DraftTargetDecodingConfig(
            target, 9, top_k=3, max_draft_depth=4, adaptive=False
        ),
        "other draft": DraftTargetDecodingConfig(str(folders["other"]), 3, adaptive=False),
    }


# They bring trees whose accepted path is not in place, so that K/V has to be moved.
MOVES = ("lookahead", "draft tree")


@devices
@pytest.mark.parametrize("name", [*MOVES, "other draft"])
def test_prompts_longer_than_a_step_give_the_text_of_plain_decoding(
    folders: dict[str, Path], plain: dict[str, Any], moves: list[int], device: str, name: str
) -> None:
    """Four requests in three places, one after another joining. Every method: see
    test_drafter_contracts.py."""
    spec = drafters(folders)[name]
    with open_llm(folders, device, spec) as llm:
        assert llm.device.startswith(device) and llm.get_metrics()["device"] == llm.device
        found = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert found == plain["greedy"]
        found = tokens_of(llm.generate(PROMPTS, SAMPLED, use_tqdm=False))
        assert found == plain["sampled"]
        metrics = llm.get_metrics()
        assert metrics["executor"]["free_pages"] == metrics["executor"]["total_pages"]
        assert metrics["speculative_decoding"]["num_draft_tokens"] > 0
        if name in MOVES:
            assert metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0
            assert moves
        if metrics["drafter"] is not None:
            assert metrics["drafter"]["failures"] == 0


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each compaction of the target's K/V or the draft model's."""
    seen: list[int] = []
    compact = ops.compact_kv

    def counted(*args: Any, **options: Any) -> None:
        seen.append(len(args[-1]))
        compact(*args, **options)

    monkeypatch.setattr(ops, "compact_kv", counted)
    return seen


@pytest.fixture(autouse=True)
def nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step-cost measurement that fails is only a warning to the engine."""
    monkeypatch.setattr("specdec_ext.engine.loop.logger.warning", pytest.fail)


@devices
@pytest.mark.parametrize("name", ["lookahead", "draft tree"])
def test_the_adapter_decodes_on_a_device(
    folders: dict[str, Path], plain: dict[str, Any], moves: list[int], device: str, name: str
) -> None:
    spec = drafters(folders)[name]
    with open_llm(folders, device, spec, model_impl="transformers") as llm:
        assert llm.model.impl == "transformers"
        found = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert found == plain["greedy"] and moves


@devices
def test_published_pages_are_taken_over(
    folders: dict[str, Path], plain: dict[str, Any], device: str
) -> None:
    spec = LookaheadDecodingConfig(4, 3, 4, adaptive=False)
    with open_llm(folders, device, spec, enable_prefix_caching=True) as llm:
        for _ in range(2):
            found = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
            assert found == plain["greedy"]
        assert llm.get_metrics()["executor"]["cached_tokens"] > 0


@devices
def test_a_lone_prompt_is_read_in_steps_that_choose_nothing(
    folders: dict[str, Path], plain: dict[str, list[list[int]]], device: str
) -> None:
    few_rows = {"max_batch_size": 3, "max_seq_len": 96, "max_num_tokens": 8}
    with open_llm(folders, device, scheduler_config=few_rows) as llm:
        assert len(PROMPTS[2]) > 4 * 8
        assert tokens_of(llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)) == [plain["greedy"][2]]


@devices
def test_a_request_fails_alone(
    folders: dict[str, Path], plain: dict[str, Any], device: str
) -> None:
    def broken(_ids: Any, _scores: Any) -> Any:
        raise RuntimeError("on purpose")

    params = [
        GREEDY,
        SamplingParams(max_tokens=14, logits_processors=[broken]),
        SamplingParams(max_tokens=14, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    ]
    with open_llm(folders, device, NGramDecodingConfig(4, adaptive=False)) as llm:
        outputs = llm.generate(PROMPTS[:3], params, use_tqdm=False)
    assert [out.outputs[0].finish_reason for out in outputs] == ["length", "error", "length"]
    assert list(outputs[0].outputs[0].token_ids) == plain["greedy"][0]
    assert list(outputs[2].outputs[0].token_ids) == plain["greedy"][2]
    assert len(outputs[2].prompt_logprobs) == len(PROMPTS[2])


@devices
def test_a_failing_pass_ends_its_requests_alone(
    folders: dict[str, Path], plain: dict[str, Any], device: str
) -> None:
    with open_llm(folders, device) as llm:
        decoder = llm.model.decoder  # type: ignore[attr-defined]
        forward = decoder.forward_rows

        def fail(*_args: Any) -> Any:
            raise RuntimeError("CUDA error: on purpose")

        decoder.forward_rows = fail
        out = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
        assert [o.outputs[0].finish_reason for o in out] == ["error", "error"]
        decoder.forward_rows = forward
        found = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert found == plain["greedy"]


@devices
def test_exact_rows_do_not_see_the_padding_of_steps_in_flight(
    folders: dict[str, Path], device: str
) -> None:
    """An enqueued step has as many rows as there may be; the text is that of a step of few."""
    how: dict[str, Any] = {"dtype": "bfloat16", "numerics": "exact"}
    with open_llm(folders, device, **how) as llm:
        expected = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    limits = {"max_batch_size": 3, "max_seq_len": 96, "max_num_tokens": 48, "overlap_depth": 1}
    spec = LookaheadDecodingConfig(4, 3, 4, adaptive=False)
    with open_llm(folders, device, spec, scheduler_config=limits, **how) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_numerics_are_kept_or_refused(folders: dict[str, Path]) -> None:
    with open_llm(folders, "cpu", numerics="exact") as llm:
        assert llm.engine.numerics == "exact"
    with pytest.raises(ConfigError, match="numerics = 'careful': expected one of auto, exact"):
        open_llm(folders, "cpu", numerics="careful")


@EMULATED
def test_exact_mode_on_a_device_bounds_how_deep_drafts_go(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the deepest that it allows the text is that of plain decoding; deeper ones are refused
    before weights are read, unless bits are not asked for."""
    repeated = [[5, 6, 7, 8] * 14, [9, 11] * 20]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    limits = {"max_batch_size": 2, "max_seq_len": 128, "max_num_tokens": 64}
    how: dict[str, Any] = {"dtype": "bfloat16", "scheduler_config": limits}
    texts, accepted = [], 0
    for spec in (None, NGramDecodingConfig(EXACT_DRAFT_DEPTH, 2, adaptive=False)):
        with open_llm(folders, "cuda-emu", spec, numerics="exact", **how) as llm:
            outputs = llm.generate(repeated, params, use_tqdm=False)
            texts.append(tokens_of(outputs))
            accepted = llm.get_metrics()["speculative_decoding"]["num_accepted_draft_tokens"]
    assert texts[0] == texts[1]
    assert accepted > 0
    deeper = NGramDecodingConfig(EXACT_DRAFT_DEPTH + 1, 2, adaptive=False)
    with open_llm(folders, "cuda-emu", deeper, **how) as llm:
        assert llm.engine.numerics == "fast"
    monkeypatch.setattr("specdec_ext.models.load_model", pytest.fail)
    with pytest.raises(ConfigError, match=r"drafts up to 25 deep; .* on a device 24 at most"):
        open_llm(folders, "cuda-emu", deeper, numerics="exact", **how)


@EMULATED
def test_predictions_go_as_deep_as_the_numerics_allow(folders: dict[str, Path]) -> None:
    """Rows cost nothing, so that a step verifies all that it may of a right prediction."""
    limits = {"max_batch_size": 2, "max_seq_len": 128, "max_num_tokens": 128}
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    passes = {}
    for numerics in ("exact", "fast"):
        with open_llm(
            folders, "cuda-emu-fast", "suffix", numerics=numerics, dtype="bfloat16",
            scheduler_config=limits,
        ) as llm:  # fmt: skip
            alone = dataclasses.replace(params, speculative_config=False)
            [text] = tokens_of(llm.generate([PROMPTS[0]], alone, use_tqdm=False))
            llm.engine._calibrate = None  # type: ignore[attr-defined]
            llm.engine.executor.set_step_cost([1, 1024], [1.0, 1.0])
            predicted = dataclasses.replace(params, prediction=text)
            [output] = llm.generate([PROMPTS[0]], predicted, use_tqdm=False)
            assert output.outputs[0].token_ids == text
            passes[numerics] = output.metrics["num_forward_passes"]
    # With the prompt 16 are verified, then 24 or 64 in each step.
    assert passes == {"exact": 1 + 4, "fast": 1 + 2}


@devices
def test_the_adapter_is_not_exact_on_a_device(folders: dict[str, Path], device: str) -> None:
    with pytest.raises(UnsupportedModelError, match="numerics = 'exact': the model's own layers"):
        open_llm(folders, device, model_impl="transformers", numerics="exact")


@EMULATED
def test_every_access_is_one_that_the_calls_allow(
    folders: dict[str, Path], plain: dict[str, Any]
) -> None:
    """On the emulator that checks bounds, races and initialisation."""
    spec = LookaheadDecodingConfig(4, 3, 4, adaptive=False)
    with open_llm(folders, "cuda-emu", spec) as llm:
        params = dataclasses.replace(GREEDY, max_tokens=5)
        found = tokens_of(llm.generate(PROMPTS[:2], params, use_tqdm=False))
    assert found == [text[:5] for text in plain["greedy"][:2]]


@devices
def test_pages_come_out_of_the_devices_free_memory(
    folders: dict[str, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"kv_cache_config": {"tokens_per_block": 16, "free_gpu_memory_fraction": 0.5}}
    monkeypatch.setattr("specdec_ext.models.place.Place.free_bytes", lambda _: 64 << 30)
    long = {"max_batch_size": 3, "max_seq_len": 512, "max_num_tokens": 48}
    long["enforce_eager"] = True  # what graphs take is measured, and others may use the device
    with open_llm(folders, device, scheduler_config=long, **whole) as llm:
        assert llm.memory.limited_by == "max_batch_size x max_seq_len"
        per_token = llm.memory.bytes_per_token
        scratch = llm.model.scratch_bytes  # type: ignore[attr-defined]
    free = scratch + 400 * per_token
    monkeypatch.setattr("specdec_ext.models.place.Place.free_bytes", lambda _: free)
    with open_llm(folders, device, scheduler_config=long, **whole) as llm:
        assert llm.memory.pool_tokens <= 200
        assert llm.memory.limited_by.startswith("free_gpu_memory_fraction = 0.5 of ")
    monkeypatch.setattr("specdec_ext.models.place.Place.free_bytes", lambda _: 100)
    monkeypatch.setattr("specdec_ext.models.load_model", pytest.fail)
    with pytest.raises(ConfigError, match=r"KV cache of 0 pages .* of (100|0) free bytes"):
        open_llm(folders, device, **whole)


# -- Refusals --------------------------------------------------------------------------------------


def test_devices_are_refused_before_weights_are_read(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_ext.models.load_model", pytest.fail)
    with pytest.raises(ConfigError, match="device = 'tpu': expected"):
        open_llm(folders, "tpu")
    with pytest.raises(ConfigError, match="device = 3: expected"):
        open_llm(folders, 3)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"device = .cuda. cannot be used: .*device=.cpu."):
            open_llm(folders, "cuda")
