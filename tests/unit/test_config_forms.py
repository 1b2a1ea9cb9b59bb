"""Every form of a configuration: text, files, other projects' spellings, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec_ext.config.engine import KvCacheConfig, SchedulerConfig
from specdec_ext.config.lookahead import LookaheadDecodingConfig
from specdec_ext.config.names import canonical_method
from specdec_ext.config.ngram import NGramDecodingConfig
from specdec_ext.config.parse import (
    parse_kv_cache_config,
    parse_scheduler_config,
    parse_speculative_config,
)
from specdec_ext.config.placement import check_placement
from specdec_ext.errors import ConfigError, UnsupportedConfigError

LOOKAHEAD_777 = LookaheadDecodingConfig(7, 7, 7)


@pytest.mark.parametrize("value", [
    LOOKAHEAD_777,
    {"method": "lookahead", "max_window_size": 7, "max_ngram_size": 7,
     "max_verification_set_size": 7},
    {"decoding_type": "Lookahead", "W": 7, "N": 7, "G": 7},
    {"speculative_algorithm": "LOOKAHEAD_DECODING", "lookahead_window_size": 7,
     "lookahead_ngram_size": 7, "lookahead_verification_set_size": 7},
    {"WINDOW_SIZE": 7, "LEVEL": 7, "GUESS_SET_SIZE": 7},
    {"method": "lookahead", "w": 7, "n": 7, "g": 7, "max_draft_len": 83},
    {"method": "lookahead", "w": 7, "n": 7, "g": 7, "num_speculative_tokens": 83},
    '{"method": "lookahead", "window-size": 7, "ngram-size": 7, "verification-set-size": 7}',
    "method: lookahead\nW: 7\nN: 7\nG: 7\n",
    "decoding_type: Lookahead\nmax_window_size: 7\nmax_ngram_size: 7\n"
    "max_verification_set_size: 7\n",
    "[7,7,7]",
    [7, 7, 7],
    (7, 7, 7),
])  # fmt: skip
def test_every_form_of_lookahead(value: object) -> None:
    assert parse_speculative_config(value) == LOOKAHEAD_777
    assert parse_speculative_config(value, method="lookahead_decoding") == LOOKAHEAD_777


NGRAM_10_2 = NGramDecodingConfig(max_draft_len=10, max_matching_ngram_size=2)


@pytest.mark.parametrize("value", [
    NGRAM_10_2,
    {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_max": 2,
     "prompt_lookup_min": 1},
    {"decoding_type": "NGram", "max_draft_len": 10, "max_matching_ngram_size": 2},
    {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 11,
     "speculative_ngram_max_match_window_size": 2},
    {"model": "[ngram]", "num_speculative_tokens": 10, "prompt_lookup_max": 2},
    {"method": "prompt-lookup", "prompt_lookup_num_tokens": 10},
    {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 2},
    {"method": "ngram", "K": 10, "M": 2, "max_concurrency": None, "draft_len_schedule": None},
    '{"method": "ngram", "max_draft_len": 10}',
    "[10,2]",
    "[10,2,[0]]",
    [10, 2, [0]],
])  # fmt: skip
def test_every_form_of_ngram(value: object) -> None:
    assert parse_speculative_config(value) == NGRAM_10_2
    assert parse_speculative_config(value, method="NGram") == NGRAM_10_2


@pytest.mark.parametrize("value", [None, "none", {"method": "none"}, "null", "~", {"method": None}])
def test_no_speculation(value: object) -> None:
    assert parse_speculative_config(value) is None


@pytest.mark.parametrize("name", ["lookahead", "NGRAM", "prompt_lookup"])
def test_a_bare_name_means_defaults(name: str) -> None:
    config = parse_speculative_config(name)
    assert config in (LookaheadDecodingConfig(), NGramDecodingConfig())
    assert config is not None and config.method == canonical_method(name)


def test_round_trip_through_json() -> None:
    for config in (LOOKAHEAD_777, NGRAM_10_2, NGramDecodingConfig(is_public_pool=True)):
        assert parse_speculative_config(json.dumps(config.to_dict())) == config


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_configuration_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"spec{suffix}"
    path.write_text('{"method": "lookahead", "W": 7, "N": 7, "G": 7}')
    assert parse_speculative_config(str(path)) == LOOKAHEAD_777
    assert parse_speculative_config(path) == LOOKAHEAD_777


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        parse_speculative_config(str(tmp_path / "missing.yaml"))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml"):
        parse_speculative_config(str(binary))
    large = tmp_path / "large.yaml"
    large.write_text("# " + "x" * 70000)
    with pytest.raises(ConfigError, match="limit 65536"):
        parse_speculative_config(str(large))


@pytest.mark.parametrize("text", [
    "{", "[1,2", "a: b: c", "{\"method\": \"ngram\"", "[" * 30000, "!!python/object:os.system {}",
    "&a [*a]",
])  # fmt: skip
def test_broken_text_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_speculative_config(text)


@pytest.mark.parametrize(("value", "message"), [
    ({"method": "ngram", "max_draft_length": 4}, "did you mean 'max_draft_len'"),
    ({"method": "ngram", 7: 4}, "unknown key '7'"),
    ({"method": "lookahead", "max_windw_size": 4}, "did you mean 'max_window_size'"),
    ({"method": "ngrm", "max_draft_len": 4}, "did you mean 'ngram'"),
    ({"method": "ngram", "decoding_type": "Lookahead"}, "given twice"),
    ({"method": "ngram", "max_draft_len": 4, "num_speculative_tokens": 5}, "given twice"),
    ({"method": "ngram", "max_draft_len": 4, "speculative_num_draft_tokens": 4}, "keep one"),
    ({"method": "lookahead", "W": 7, "N": 7, "G": 7, "max_draft_len": 84}, "84.*needs 83"),
    ({"num_speculative_tokens": 5}, "no method"),
    ({}, "no method"),
    ("", r"configuration '' holds nothing; leave it out"),
    (" \n", "holds nothing"),
    ("# ngram", "holds nothing"),
    (["suffix", ""], "holds nothing"),
    ({"method": ""}, "method = '': there is no such method; use 'auto', .* or 'none'"),
    ({"decoding_type": " "}, "decoding_type = ' ': there is no such method"),
    ({"typo": 1}, "unknown key 'typo'; correct or remove it, and add the method"),
    ({"max_draft_len": 3, "num_speculative_tokns": 5}, r"'num_.*tokns' \(did you mean 'num_spe"),
    ({"methd": "ngram"}, r"unknown key 'methd'; did you mean 'method'\?$"),
    ('{"method": "ngram", "method": "lookahead"}', "given twice"),
    ("method: ngram\nmax_draft_len: 3\nmax_draft_len: 4\n", "given twice"),
    ([7, 7], None),
    ([7], "W,N,G"),
    ([1, 2, 3, 4], "W,N,G"),
    (5, "expected a configuration"),
    (KvCacheConfig(), "KvCacheConfig"),
])  # fmt: skip
def test_mistakes_are_explained(value: object, message: str | None) -> None:
    if message is None:  # two numbers are prompt lookup, not a short triple
        assert parse_speculative_config(value) == NGramDecodingConfig(7, 7)
        return
    with pytest.raises(ConfigError, match=message):
        parse_speculative_config(value)


def test_form_must_fit_the_flag() -> None:
    with pytest.raises(ConfigError, match="W,N,G"):
        parse_speculative_config("[10,2]", method="lookahead")
    with pytest.raises(ConfigError, match="W,N,G"):
        parse_speculative_config("[10,2,[0]]", method="lookahead")
    with pytest.raises(ConfigError, match="K,M"):
        parse_speculative_config("[7,7,7]", method="ngram")
    with pytest.raises(ConfigError, match="NGramDecodingConfig"):
        parse_speculative_config(NGRAM_10_2, method="lookahead")
    with pytest.raises(ConfigError, match="given twice"):
        parse_speculative_config({"method": "ngram"}, method="lookahead")


@pytest.mark.parametrize("method", [
    "EAGLE", "mtp", "pard",
])  # fmt: skip
def test_methods_of_later_versions_are_refused_by_name(method: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=method):
        parse_speculative_config({"method": method, "max_draft_len": 4})


@pytest.mark.parametrize(("key", "value"), [
    ("acceptance_rate_window_size", 10),
    ("draft_tensor_parallel_size", 2),
    ("speculative_model", "/some/model"),
    ("prompt_lookup_min", 2),
])  # fmt: skip
def test_features_of_later_versions_are_refused_not_ignored(key: str, value: object) -> None:
    with pytest.raises(UnsupportedConfigError, match=key):
        parse_speculative_config({"method": "ngram", "max_draft_len": 4, key: value})


def test_device_lists() -> None:
    with pytest.raises(ConfigError, match="2 devices for tensor_parallel_size = 1"):
        parse_speculative_config("[10,2,[0,1]]", method="ngram")
    with pytest.raises(ConfigError, match="0 devices"):
        parse_speculative_config("[10,2,[]]", method="ngram")
    with pytest.raises(ConfigError, match=r"devices\[0\] = 1"):
        parse_speculative_config("[10,2,[1]]", method="ngram")
    with pytest.raises(ConfigError, match=r"devices\[0\]"):
        parse_speculative_config([10, 2, [False]], method="ngram")


@pytest.mark.parametrize(
    ("lists", "ranks", "devices", "error", "message"),
    [
        (([0], [0.5]), 1, 0, ConfigError, "the target's devices .* expected an integer"),
        (([True], [0]), 1, 0, ConfigError, "the draft's devices"),
        (([-1], [0]), 1, 0, ConfigError, "= -1: out of range"),
        (([0], [1, 2, 1]), 3, 0, ConfigError, r"\[1, 2, 1\] name a device twice"),
        (([0, 1], [2]), 1, 0, UnsupportedConfigError, r"\[0, 1\]: a draft model is not spread"),
        (([0], [1, 2, 3, 4]), 1, 0, ConfigError, "are 4, tensor_parallel_size = 1; use --tensor"),
        (([0], [1]), 2, 0, ConfigError, "are 1, tensor_parallel_size = 2"),
        (([0], [1]), 1, 1, ConfigError, "device = 1: out of range.*there are 1 devices"),
        (([7], [1]), 1, 2, ConfigError, "the draft's devices: device = 7: out of range"),
        (([1], [0, 1]), 2, 2, ConfigError, r"1 is that of the target's rank 1 .* its own, or 0"),
    ],
)
def test_devices_of_draft_and_target(
    lists: tuple[list[object], list[object]], ranks: int, devices: int,
    error: type[Exception], message: str,
) -> None:  # fmt: skip
    with pytest.raises(error, match=message):
        check_placement(*lists, ranks, devices)


def test_devices_that_can_be_had() -> None:
    for draft, target, ranks, devices in (
        ([], [], 4, 0), ([0], [0], 1, 0), ([0], [0, 1], 2, 0), ([0], [0], 1, 1), ([], [1], 1, 2),
        ([0], [1], 1, 2), ([0], [1, 2, 3, 4], 4, 5), ([3], [], 1, 4), ([2], [2, 0], 2, 3),
    ):  # fmt: skip
        assert check_placement(draft, target, ranks, devices) == ""
    assert "both run on the CPU" in check_placement([0], [1, 2, 3, 4], 4, 0)


def test_kv_and_scheduler_forms() -> None:
    assert parse_kv_cache_config(None) == KvCacheConfig()
    assert parse_kv_cache_config({"block_size": 16}) == KvCacheConfig(tokens_per_block=16)
    assert parse_kv_cache_config('{"kv_cache_dtype": "bf16"}').dtype == "bfloat16"
    assert parse_kv_cache_config("tokens_per_block: 64").tokens_per_block == 64
    assert parse_scheduler_config({"max_num_seqs": 8, "max_model_len": 512}) == SchedulerConfig(
        max_batch_size=8, max_seq_len=512
    )
    policy = parse_scheduler_config({"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"})
    assert policy == SchedulerConfig()
    with pytest.raises(ConfigError, match="did you mean 'max_batch_size'"):
        parse_scheduler_config({"max_batchsize": 8})
    for text in ('{"max_attention_window_vec": [64, 32]}', "max_attention_window: [64, 32]"):
        windowed = parse_kv_cache_config(text)
        assert windowed.max_attention_window == windowed.attention_windows == (64, 32)
        assert parse_kv_cache_config(windowed.to_dict()) == windowed
    assert parse_kv_cache_config({"max_attention_window_size": 64}).attention_windows == (64,)
    assert parse_kv_cache_config({"sink_token_length": None}) == KvCacheConfig()
    assert parse_kv_cache_config({"enable_prefix_caching": True}).enable_block_reuse
    assert parse_kv_cache_config({"kv_cache_enable_block_reuse": True}).enable_block_reuse
    with pytest.raises(ConfigError, match="expected an object"):
        parse_kv_cache_config("[1]")
