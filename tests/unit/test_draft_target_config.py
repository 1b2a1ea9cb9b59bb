"""DraftTargetDecodingConfig: other projects' spellings, limits, refusals; the budget's rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec_ext import (
    ConfigError,
    DraftTargetDecodingConfig,
    KvCacheConfig,
    ReDrafterDecodingConfig,
    SchedulerConfig,
    UnsupportedConfigError,
)
from specdec_ext.config.build_check import check_build
from specdec_ext.config.names import canonical_method
from specdec_ext.config.parse import parse_speculative_config
from specdec_ext.drafters import shipped
from specdec_ext.engine.memory_plan import DraftPages, plan_memory


def parsed(value: Any) -> DraftTargetDecodingConfig:
    config = parse_speculative_config(value)
    assert isinstance(config, DraftTargetDecodingConfig)
    return config


@pytest.mark.parametrize(
    "spelling",
    [
        "draft_target", "Draft_Target", "draft-target", "draft_tokens_external", "draft_model",
        "STANDALONE", "draft-simple", "DRAFT_TOKENS_EXTERNAL",
    ],
)  # fmt: skip
def test_every_project_names_the_method_in_its_way(spelling: str) -> None:
    assert canonical_method(spelling) == "draft_target"
    config = parsed({"method": spelling, "speculative_model": "m"})
    assert (config.model, config.max_draft_len) == ("m", 4)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        # vLLM
        ({"model": "m", "num_speculative_tokens": 5}, {"max_draft_len": 5}),
        (
            {"method": "draft_model", "model": "m", "num_speculative_tokens": 3,
             "draft_tensor_parallel_size": 1, "quantization": None,
             "draft_sample_method": "greedy"},
            {"max_draft_len": 3, "use_draft_logits": False},
        ),
        (
            {"model": "m", "num_speculative_tokens": 4, "use_heterogeneous_vocab": True},
            {"allow_vocab_mapping": True},
        ),
        # TensorRT-LLM
        (
            {"decoding_type": "Draft_Target", "speculative_model_dir": "m", "max_draft_len": 6,
             "max_concurrency": None},
            {"max_draft_len": 6},
        ),
        (
            {"decoding_type": "Draft_Target", "speculative_model": "m", "max_draft_len": 3,
             "max_total_draft_tokens": 12, "top_k": 4},
            {"max_draft_len": 12, "max_draft_depth": 3, "top_k": 4},
        ),
        # SGLang
        (
            {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "m",
             "speculative_num_steps": 3, "speculative_eagle_topk": 1,
             "speculative_num_draft_tokens": 4},
            {"max_draft_len": 3, "max_draft_depth": 3, "top_k": 1},
        ),
        (
            {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "m",
             "speculative_num_steps": 3, "speculative_eagle_topk": 2,
             "speculative_num_draft_tokens": 8},
            {"max_draft_len": 7, "max_draft_depth": 3, "top_k": 2},
        ),
        # transformers, llama.cpp
        (
            {"assistant_model": "m", "num_assistant_tokens": 20,
             "assistant_confidence_threshold": 0.4},
            {"max_draft_len": 20, "min_confidence": 0.4},
        ),
        (
            {"spec_type": "draft-simple", "spec-draft-model": "m", "spec-draft-n-max": 3,
             "spec-draft-p-min": 0.1},
            {"max_draft_len": 3, "min_confidence": 0.1},
        ),
    ],
)  # fmt: skip
def test_other_projects_fields(value: dict[str, Any], expected: dict[str, Any]) -> None:
    config = parsed(value)
    assert config.model == "m"
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("spelling", ["speculative_model", "speculative_model_dir"])
def test_other_spellings_of_the_model(spelling: str) -> None:
    assert DraftTargetDecodingConfig(**{spelling: "m"}) == DraftTargetDecodingConfig("m")
    assert ReDrafterDecodingConfig(**{spelling: "m"}).model == "m"
    assert parsed({"method": "draft_target", spelling: "m"}) == DraftTargetDecodingConfig("m")
    with pytest.raises(ConfigError, match="model is given twice, as 'n' and as 'm'"):
        DraftTargetDecodingConfig(**{"model": "n", spelling: "m"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speculative_model": ""}, ".model = '': expected the folder of a draft model"),
        ({"speculative_model": 3}, ".model = 3: expected the folder .* or None for the one"),
        ({"max_draft_len": 0}, "max_draft_len = 0: out of range"),
        ({"max_draft_len": 128}, "max_draft_len = 128: out of range"),
        ({"max_draft_len": 4.0}, "expected an integer"),
        ({"top_k": 0}, "top_k = 0: out of range"),
        ({"max_draft_depth": 2}, "a chain is as deep as it is long"),
        ({"top_k": 2, "max_draft_depth": 5}, "max_draft_depth = 5: out of range"),
        ({"top_k": 64, "max_draft_len": 100, "max_draft_depth": 4}, "193 rows .* limit 128"),
        ({"min_confidence": 1.5}, "min_confidence = 1.5: out of range"),
        ({"min_confidence": float("nan")}, "must be finite"),
        ({"adaptive": 1}, "expected true or false"),
        ({"use_draft_logits": None}, "expected true or false"),
        ({"dtype": "float12"}, "dtype = 'float12'"),
        ({"model_impl": "onnx"}, "model_impl = 'onnx'"),
        ({"max_kv_tokens": 0}, "max_kv_tokens = 0: out of range"),
    ],
)
def test_a_bad_value_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftTargetDecodingConfig(**{"speculative_model": "m", **arguments})


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"draft_tensor_parallel_size": 2}, UnsupportedConfigError, "only 1 is supported"),
        ({"quantization": "fp8"}, UnsupportedConfigError, "quantization"),
        ({"draft_sample_method": "beam"}, ConfigError, "draft_sample_method"),
        ({"speculative_num_draft_tokens": 1}, ConfigError, "speculative_num_draft_tokens = 1"),
        ({"speculative_modle": "m"}, ConfigError, "did you mean 'speculative_model'"),
        ({"draft_model": "n"}, ConfigError, "given twice"),
    ],
)
def test_a_bad_key_is_refused(value: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parsed({"method": "draft_target", "speculative_model": "m", **value})


def test_the_method_alone_means_the_shipped_draft_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parsed("draft_target")
    assert config.model is None
    assert config == parsed({"method": "draft_target"}) == DraftTargetDecodingConfig()
    assert config == check_build(None, None, "draft_tokens_external")
    monkeypatch.setattr(shipped, "default_drafter", lambda: tmp_path / "shipped")
    with pytest.raises(ConfigError, match=r"model = None: .*the target is '.*'; give the folder"):
        shipped.draft_folder_of(config, tmp_path)
    monkeypatch.setattr(shipped, "is_default_model", lambda path: path == tmp_path)
    assert shipped.draft_folder_of(config, tmp_path) == tmp_path / "shipped"
    named = DraftTargetDecodingConfig(tmp_path / "mine")
    assert shipped.draft_folder_of(named, tmp_path) == tmp_path / "mine"


def test_a_mode_must_fit_the_draft_model() -> None:
    with pytest.raises(ConfigError, match="a draft model with max_draft_len = 4"):
        check_build({"draft_model": "m"}, 5, None)
    assert check_build({"draft_model": "m"}, 4, "draft_tokens_external") is not None


# -- memory ---------------------------------------------------------------------------------------


def plan(free: int, max_tokens: int | None = None, draft: DraftPages | None = None) -> Any:
    return plan_memory(
        bytes_per_token=2 * 2 * 8 * 4, max_position=100, draft_len=4,
        kv_cache=KvCacheConfig(
            tokens_per_block=4, max_tokens=max_tokens, free_gpu_memory_fraction=1.0
        ),
        scheduler=SchedulerConfig(max_batch_size=2), free_bytes=free, draft=draft,
    )  # fmt: skip


def test_target_and_draft_share_one_budget() -> None:
    alone = plan(1 << 20)
    both = plan(1 << 20, draft=DraftPages(32))
    assert both.num_pages == both.draft_num_pages == alone.num_pages == 52
    assert (both.bytes_per_token, both.draft_bytes_per_token) == (128, 32)
    assert both.draft_pool_bytes == 52 * 4 * 32
    # Short of memory, both shrink together: a page costs (128 + 32) * 4 bytes.
    short = plan(30_000, draft=DraftPages(32))
    assert short.num_pages == short.draft_num_pages == 30_000 // (160 * 4)
    assert short.pool_bytes + short.draft_pool_bytes <= 30_000
    fixed = plan(20_000, draft=DraftPages(32, max_tokens=10))
    assert fixed.draft_num_pages == 3
    assert fixed.num_pages == (20_000 - 3 * 128) // 512


def test_a_draft_model_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs 12800 bytes of KV cache \(2560 of them for the"):
        plan(12_000, max_tokens=80, draft=DraftPages(32))
    assert plan(12_000, max_tokens=80).num_pages == 20
    with pytest.raises(ConfigError, match="max_kv_tokens = 4000 needs 128000 bytes"):
        plan(100_000, draft=DraftPages(32, max_tokens=4000))


# -- command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flag",
    ["--draft_model", "--speculative-model", "--speculative_draft_model_path", "--assistant-model"],
)
def test_the_command_line_names_a_draft_model(flag: str) -> None:
    from specdec_ext.cli import main
    from specdec_ext.cli.common import SpecdecParser, add_llm_arguments, llm_kwargs, normalize_argv

    parser = SpecdecParser()
    add_llm_arguments(parser)
    argv = [flag, "m", "--max_draft_len", "6", "--no_adaptive"]
    args = parser.parse_args(normalize_argv(argv))
    config = llm_kwargs(args)["speculative_config"]
    assert config == DraftTargetDecodingConfig("m", max_draft_len=6, adaptive=False)
    assert main(["inspect", flag, "m", "--lookahead_config", "[7,7,7]"]) == 2


def test_a_device_of_its_own() -> None:
    assert parsed({"model": "m", "method": "draft_target"}).device is None
    assert parsed({"model": "m", "method": "draft_target", "device": "cuda:1"}).device == "cuda:1"
    with pytest.raises(ConfigError, match="device = 1: expected the name of a device, such as"):
        DraftTargetDecodingConfig("m", device=1)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedConfigError, match=r"'cuda:0,1': 2 devices, .* name one"):
        DraftTargetDecodingConfig("m", device="cuda:0,1")


def test_pages_on_a_device_of_its_own() -> None:
    """They take nothing from the target's, and are as many, if they fit."""
    sizes: dict[str, Any] = dict(
        bytes_per_token=100, max_position=64, draft_len=4, free_bytes=100_000,
        scheduler=SchedulerConfig(max_batch_size=4, max_seq_len=64),
        kv_cache=KvCacheConfig(tokens_per_block=8),
    )  # fmt: skip
    alone = plan_memory(**sizes)
    for free, pages in ((100_000, 36), (10_000, 22)):
        draft = DraftPages(50, free_bytes=free)
        plan = plan_memory(**sizes, draft=draft)
        assert (plan.num_pages, plan.pool_bytes) == (alone.num_pages, alone.pool_bytes)
        assert (plan.draft_num_pages, plan.draft_pool_bytes) == (pages, pages * 400)
    for draft, message in (
        (DraftPages(50, free_bytes=300), "device: 36 pages .* need 14400 bytes, limit 270 bytes"),
        (DraftPages(50, 80, free_bytes=4000), "max_kv_tokens = 80: 10 pages .* limit 3600 bytes"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan_memory(**sizes, draft=draft)
