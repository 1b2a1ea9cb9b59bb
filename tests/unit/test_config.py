"""Configurations: numbers, limits, build against run time (without torch or the compiled core)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_ext.config.build_check import check_build, refuse_unknown_arguments, with_sizes
from specdec_ext.config.engine import KvCacheConfig, SchedulerConfig
from specdec_ext.config.limits import MAX_DRAFT_LEN
from specdec_ext.config.lookahead import LookaheadDecodingConfig, max_draft_len
from specdec_ext.config.ngram import NGramDecodingConfig
from specdec_ext.config.parse import (
    parse_scheduler_config,
)
from specdec_ext.config.ranks import (
    SECONDS_OF_SILENCE,
    World,
    resolve_tensor_parallel_size,
    world_of,
)
from specdec_ext.config.sources import CompositeDecodingConfig
from specdec_ext.config.suffix import SuffixDecodingConfig
from specdec_ext.errors import ConfigError, UnsupportedConfigError


@pytest.mark.parametrize(
    ("triple", "expected"),
    [
        ((7, 7, 7), 83),
        ((2, 2, 1), 2),
        ((1, 1, 0), 0),
        ((4, 3, 4), 15),
        ((10, 9, 8), 143),
        ((3, 3, 3), 11),
        ((5, 5, 5), 39),
        ((15, 5, 15), 119),
    ],
)
def test_max_draft_len_published_values(triple: tuple[int, int, int], expected: int) -> None:
    assert max_draft_len(*triple) == expected


@pytest.mark.parametrize("triple", [(0, 3, 4), (4, 0, 4), (4, 3, -1), (2, 1, 0), (1, 1, 1)])
def test_max_draft_len_refuses_invalid_triples(triple: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError):
        max_draft_len(*triple)


@given(st.integers(1, 40), st.integers(2, 12), st.integers(0, 40))
def test_lookahead_accepts_exactly_what_fits_a_step(w: int, n: int, g: int) -> None:
    # Counted, not computed by the formula: the window's rows and the guesses' tokens.
    window_rows = (n - 2) + (w - 1) * (n - 1)
    total = window_rows + g * (n - 1)
    assert max_draft_len(w, n, g) == total
    if total <= MAX_DRAFT_LEN:
        config = LookaheadDecodingConfig(w, n, g)
        assert config.triple == (w, n, g)
        assert config.max_draft_len == total
    else:
        with pytest.raises(ConfigError, match=rf"{total}.*limit 127"):
            LookaheadDecodingConfig(w, n, g)


def test_plain_triple() -> None:
    config = LookaheadDecodingConfig(1, 1, 0)
    assert config.is_plain
    assert config.max_draft_len == 0
    assert config.max_draft_path_len == 0


@pytest.mark.parametrize(
    ("config", "deepest"),
    [
        (LookaheadDecodingConfig(1, 1, 0), 0),
        (LookaheadDecodingConfig(4, 3, 4), 4),
        (LookaheadDecodingConfig(7, 7, 7), 11),
        (LookaheadDecodingConfig(1, 6, 4), 5),  # guesses go deeper than the window
        (LookaheadDecodingConfig(1, 6, 0), 4),
        (NGramDecodingConfig(30, 2), 30),
        (SuffixDecodingConfig(max_draft_len=60, max_tree_depth=40), 40),
        (CompositeDecodingConfig((SuffixDecodingConfig(), LookaheadDecodingConfig(7, 7, 7))), 24),
    ],
)  # fmt: skip
def test_how_deep_drafts_go(config: Any, deepest: int) -> None:
    assert config.deepest_draft == deepest


def test_defaults_are_the_designs() -> None:
    assert LookaheadDecodingConfig().triple == (4, 3, 4)
    ngram = NGramDecodingConfig()
    assert (ngram.max_draft_len, ngram.max_matching_ngram_size) == (4, 2)
    assert (ngram.is_keep_all, ngram.is_use_oldest, ngram.is_public_pool) == (True, True, False)
    kv = KvCacheConfig()
    assert (kv.tokens_per_block, kv.max_tokens, kv.dtype) == (32, None, "auto")
    scheduler = SchedulerConfig()
    assert (scheduler.max_batch_size, scheduler.policy) == (32, "guaranteed_no_evict")


def test_configs_are_frozen() -> None:
    for config in (LookaheadDecodingConfig(), NGramDecodingConfig(), KvCacheConfig()):
        field = dataclasses.fields(config)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field, 1)


@pytest.mark.parametrize("value", [True, 7.0, "7", None, math.nan, 2**70])
def test_integers_are_integers(value: object) -> None:
    with pytest.raises(ConfigError, match=r"max_window_size|max_draft_len"):
        LookaheadDecodingConfig(value, 3, 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"NGramDecodingConfig\.max_draft_len"):
        NGramDecodingConfig(max_draft_len=value)  # type: ignore[arg-type]


def test_numpy_integers_become_ints() -> None:
    config = LookaheadDecodingConfig(np.int64(7), np.int32(7), np.uint8(7))  # type: ignore[arg-type]
    assert all(type(v) is int for v in config.triple)
    assert type(NGramDecodingConfig(max_draft_len=np.int16(9)).max_draft_len) is int  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [
    ("max_draft_len", 0), ("max_draft_len", 128), ("max_matching_ngram_size", 0),
    ("max_matching_ngram_size", 9), ("is_keep_all", 1), ("adaptive", "yes"),
])  # fmt: skip
def test_ngram_refusals_name_the_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        NGramDecodingConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value", "error"), [
    ("tokens_per_block", 48, ConfigError),
    ("tokens_per_block", 256, ConfigError),
    ("tokens_per_block", 0, ConfigError),
    ("max_tokens", 0, ConfigError),
    ("max_tokens", 31, ConfigError),
    ("free_gpu_memory_fraction", 0.0, ConfigError),
    ("free_gpu_memory_fraction", 1.01, ConfigError),
    ("free_gpu_memory_fraction", math.nan, ConfigError),
    ("enable_block_reuse", 1, ConfigError),
    ("max_attention_window", 0, ConfigError),
    ("max_attention_window", True, ConfigError),
    ("max_attention_window", "256", ConfigError),
    ("max_attention_window", (), ConfigError),
    ("max_attention_window", [64, 0], ConfigError),
    ("sink_token_length", -1, ConfigError),
    ("dtype", "fp8_e5m2", UnsupportedConfigError),
    ("dtype", "nvfp4", UnsupportedConfigError),
    ("dtype", "int16", ConfigError),
    ("dtype", "float64", ConfigError),
])  # fmt: skip
def test_kv_cache_refusals(field: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=field) as info:
        KvCacheConfig(**{field: value})  # type: ignore[arg-type]
    assert type(info.value) is error


@pytest.mark.parametrize(("spelling", "name"), [
    ("auto", "auto"), ("bf16", "bfloat16"), ("torch.bfloat16", "bfloat16"), ("half", "float16"),
    ("fp8", "fp8"), ("FP8", "fp8"), ("fp8_e4m3", "fp8"), ("float8_e4m3fn", "fp8"),
    ("torch.float8_e4m3fn", "fp8"), ("int8", "int8"), ("torch.int8", "int8"),
])  # fmt: skip
def test_spellings_of_kv_types(spelling: str, name: str) -> None:
    assert KvCacheConfig(dtype=spelling).dtype == name


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64, 128])
def test_all_powers_of_two_are_page_sizes(size: int) -> None:
    assert KvCacheConfig(tokens_per_block=size).tokens_per_block == size


def test_page_size_refusal_offers_the_neighbours() -> None:
    with pytest.raises(ConfigError, match="use 32 or 64"):
        KvCacheConfig(tokens_per_block=48)


@pytest.mark.parametrize(("field", "value", "error"), [
    ("max_batch_size", 0, ConfigError),
    ("max_seq_len", 1, ConfigError),
    ("max_num_tokens", 0, ConfigError),
    ("policy", "static", ConfigError),
    ("enable_chunked_prefill", 0, ConfigError),
])  # fmt: skip
def test_scheduler_refusals(field: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=field) as info:
        SchedulerConfig(**{field: value})  # type: ignore[arg-type]
    assert type(info.value) is error


@pytest.mark.parametrize(("given", "depth"), [
    ({}, "auto"), ({"overlap_depth": "auto"}, "auto"), ({"overlap_depth": 2}, 2),
    ({"run_ahead": None}, "auto"), ({"run_ahead": 0}, 0), ({"run_ahead": 2}, 2),
    ({"async_scheduling": True}, 1), ({"async_scheduling": False}, 0),
    ({"disable_overlap_scheduler": True}, 0), ({"disable_overlap_scheduler": False}, "auto"),
    ({"run_ahead": 1, "overlap_depth": 1}, 1), ({"run_ahead": 1, "async_scheduling": True}, 1),
])  # fmt: skip
def test_spellings_of_the_overlap_depth(given: dict[str, Any], depth: object) -> None:
    for config in (SchedulerConfig(**given), parse_scheduler_config(given)):
        assert config.overlap_depth == depth
        assert type(config.overlap_depth) is type(depth)
        assert config.resolved_depth == (0 if depth == "auto" else depth)
        assert config.to_dict()["overlap_depth"] == depth


@pytest.mark.parametrize(("given", "message"), [
    ({"overlap_depth": 3}, "overlap_depth = 3"), ({"run_ahead": 3}, "overlap_depth = 3"),
    ({"run_ahead": True}, "overlap_depth"), ({"overlap_depth": "two"}, "'two'"),
    ({"overlap_depth": None}, "overlap_depth = None"),
    ({"async_scheduling": 1}, "async_scheduling"),
    ({"disable_overlap_scheduler": 0}, "disable_overlap_scheduler"),
    ({"overlap_depth": 1, "run_ahead": 2}, "given twice, as 1 and as 2"),
    ({"overlap_depth": 0, "async_scheduling": True}, "async_scheduling = True"),
])  # fmt: skip
def test_overlap_depths_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**given)
    with pytest.raises(ConfigError, match=message):
        parse_scheduler_config(given)


def test_sizes_may_be_given_to_llm_directly() -> None:
    scheduler = SchedulerConfig(max_batch_size=8)
    assert with_sizes(scheduler, max_batch_size=None) is scheduler
    both = with_sizes(scheduler, max_batch_size=8, max_seq_len=64, max_num_tokens=32)
    assert (both.max_batch_size, both.max_seq_len, both.max_num_tokens) == (8, 64, 32)
    assert with_sizes(SchedulerConfig(), max_batch_size=2).max_batch_size == 2
    with pytest.raises(ConfigError, match=r"= 4 but scheduler_config\.max_batch_size = 8"):
        with_sizes(scheduler, max_batch_size=4)
    with pytest.raises(ConfigError, match="max_seq_len = 1"):
        with_sizes(scheduler, max_seq_len=1)
    with pytest.raises(ConfigError, match="max_num_tokens"):
        with_sizes(scheduler, max_num_tokens=True)


LOOKAHEAD_777 = LookaheadDecodingConfig(7, 7, 7)
NGRAM_10_2 = NGramDecodingConfig(max_draft_len=10, max_matching_ngram_size=2)


def test_build_and_run_time_must_agree() -> None:
    assert check_build(LOOKAHEAD_777, 83, "lookahead_decoding") == LOOKAHEAD_777
    assert check_build("[7,7,7]", 83, None) == LOOKAHEAD_777
    assert check_build(None, None, None) is None
    assert check_build(None, 0, "none") is None
    assert check_build(None, 15, "lookahead_decoding") == LookaheadDecodingConfig()
    assert check_build(None, 7, "ngram") == NGramDecodingConfig(max_draft_len=7)
    assert check_build(NGRAM_10_2, 10, "NGRAM") == NGRAM_10_2
    with pytest.raises(ConfigError, match=r"max_draft_len = 84 but .*\(7, 7, 7\).* 83"):
        check_build(LOOKAHEAD_777, 84, None)
    with pytest.raises(ConfigError, match=r"max_draft_len = 4 but .* = 10"):
        check_build(NGRAM_10_2, 4, None)
    with pytest.raises(ConfigError, match="max_draft_len = 4 but no speculative_config"):
        check_build(None, 4, None)
    with pytest.raises(ConfigError, match="agree"):
        check_build({"method": "ngram"}, None, "lookahead_decoding")
    with pytest.raises(ConfigError, match=r"0..127"):
        check_build(None, 128, "ngram")
    with pytest.raises(UnsupportedConfigError, match="eagle"):
        check_build(None, None, "eagle")


def test_arguments_of_other_projects() -> None:
    refuse_unknown_arguments({"pipeline_parallel_size": 1, "enable_lora": False})
    with pytest.raises(ConfigError, match="did you mean 'quantization'"):
        refuse_unknown_arguments({"quantisation": "int8"})
    with pytest.raises(UnsupportedConfigError, match="pipeline_parallel_size = 2"):
        refuse_unknown_arguments({"pipeline_parallel_size": 2})
    with pytest.raises(UnsupportedConfigError, match="max_beam_width = 4"):
        refuse_unknown_arguments({"max_beam_width": 4})
    with pytest.raises(ConfigError, match="write max_seq_len="):
        refuse_unknown_arguments({"max_model_len": 5})
    with pytest.raises(ConfigError, match="did you mean 'speculative_config'"):
        refuse_unknown_arguments({"speculativ_config": {}})


def test_ranks_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []  # a rank that ends first would have rank 0 stopped before it speaks
    monkeypatch.setattr("specdec_ext.config.ranks.time.sleep", waits.append)

    def world(**changes: str) -> World | None:
        names = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        return world_of({**names, **changes})

    assert world_of({"RANK": "1", "WORLD_SIZE": "2"}) is None
    assert world() == World(1, 2, 2)
    assert world(LOCAL_WORLD_SIZE="1") == World(1, 2, 1)
    for changes in ({"RANK": "2"}, {"RANK": "-1"}, {"WORLD_SIZE": "x"}, {"LOCAL_WORLD_SIZE": "0"}):
        with pytest.raises(ConfigError, match="torchrun"):
            world(**changes)
    for port in ("0", "-1", "65536"):
        with pytest.raises(ConfigError, match=rf"MASTER_PORT = {port}: .*1\.\.65535.*--standalone"):
            world(RANK="0", MASTER_PORT=port)
        with pytest.raises(SystemExit) as silent:  # rank 0 says it
            world(MASTER_PORT=port)
        assert silent.value.code == ConfigError.exit_code
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        world(MASTER_PORT="http")
    assert resolve_tensor_parallel_size(None, None) == 1
    assert resolve_tensor_parallel_size(None, World(0, 3, 3)) == 3
    assert resolve_tensor_parallel_size(2, World(1, 2, 2)) == 2
    with pytest.raises(
        ConfigError, match=r"= 4 but torchrun has started 2 ranks.*--nproc-per-node 4"
    ):
        resolve_tensor_parallel_size(4, World(0, 2, 2))
    with pytest.raises(SystemExit) as ended:  # rank 0 says it
        resolve_tensor_parallel_size(4, World(1, 2, 2))
    assert ended.value.code == ConfigError.exit_code
    assert waits == [SECONDS_OF_SILENCE] * 4
    for size in (True, 0, 65, "2"):
        with pytest.raises(ConfigError, match="tensor_parallel_size"):
            resolve_tensor_parallel_size(size, None)
