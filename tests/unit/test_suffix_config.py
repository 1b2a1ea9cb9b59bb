"""SuffixDecodingConfig: forms, other projects' names, refusals; requests within the engine's."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specdec_ext import ConfigError, RequestError, SamplingParams, SuffixDecodingConfig
from specdec_ext.cli import _make_parser
from specdec_ext.cli.speculation import speculative_config
from specdec_ext.config.build_check import check_build
from specdec_ext.config.parse import parse_speculative_config
from specdec_ext.engine.drafting_arguments import drafting_arguments
from specdec_ext.request.speculation import resolve_speculation

OWN = SuffixDecodingConfig(max_draft_len=12, max_tree_depth=30, max_spec_factor=2.0)


@pytest.mark.parametrize(
    "value",
    [
        OWN,
        {**OWN.to_dict()},
        {
            "method": "suffix", "num_speculative_tokens": 12, "suffix_decoding_max_tree_depth": 30,
            "suffix_decoding_max_spec_factor": 2.0, "suffix_decoding_min_token_prob": 0.1,
            "suffix_decoding_max_cached_requests": 0,
        },
        # vLLM's keys name the method themselves.
        {"num_speculative_tokens": 12, "suffix_decoding_max_tree_depth": 30,
         "suffix_decoding_max_spec_factor": 2},
        '{"method": "Suffix-Decoding", "max_draft_len": 12, "max_depth": 30, "max_spec_factor": 2}',
    ],
)  # fmt: skip
def test_forms(value: Any) -> None:
    assert parse_speculative_config(value) == OWN


@pytest.mark.parametrize("name", ["suffix", "SUFFIX"])
def test_the_name_alone_and_the_mode(name: str) -> None:
    assert parse_speculative_config(name) == SuffixDecodingConfig()
    assert check_build(None, None, name) == SuffixDecodingConfig()
    assert check_build(None, 20, name) == SuffixDecodingConfig(max_draft_len=20)
    with pytest.raises(ConfigError, match="suffix decoding with max_draft_len = 12 needs"):
        check_build(OWN, 10, None)


def test_flags() -> None:
    parse = _make_parser().parse_args
    args = parse(["generate", "--input-text", "x", "--suffix", "--max-draft-len", "12"])
    assert speculative_config(args) == SuffixDecodingConfig(max_draft_len=12)
    args = parse(["generate", "--input-text", "x", "--suffix", "--no-adaptive"])
    assert speculative_config(args) == SuffixDecodingConfig(adaptive=False)
    with pytest.raises(SystemExit):
        speculative_config(
            parse(["generate", "--input-text", "x", "--suffix", "--lookahead_config", "[4,3,4]"])
        )


def test_the_executor_gets_what_was_asked() -> None:
    assert drafting_arguments(OWN) == {
        "method": "suffix",
        "suffix_cached_requests": 0,
        "suffix": {
            "max_draft_len": 12, "max_tree_depth": 30, "max_spec_factor": 2.0,
            "min_token_prob": 0.1,
        },
        "draft_len_schedule": [],
    }  # fmt: skip
    assert OWN.max_draft_path_len == 12
    assert SuffixDecodingConfig(max_draft_len=40).max_draft_path_len == 24


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("max_draft_len", 0, "max_draft_len = 0: out of range, allowed 1..127"),
        ("max_draft_len", True, "expected an integer"),
        ("max_tree_depth", 65, "max_tree_depth = 65: out of range, allowed 1..64"),
        ("max_spec_factor", 0.0, "max_spec_factor = 0.0: out of range"),
        ("max_spec_factor", math.nan, "must be finite"),
        ("min_token_prob", 1.1, "min_token_prob = 1.1: out of range, allowed 0.0..1.0"),
        ("min_token_prob", "a", "expected a number"),
        ("max_cached_requests", -1, "max_cached_requests = -1: out of range"),
        ("max_cached_requests", 1_000_001, "max_cached_requests = 1000001: out of range"),
        ("max_cached_requests", 2.5, "expected an integer"),
        ("adaptive", 1, "expected true or false"),
    ],
)
def test_refusals(field: str, value: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        SuffixDecodingConfig(**{field: value})


def test_spellings_of_vllm() -> None:
    config = parse_speculative_config(
        {"method": "suffix", "suffix_decoding_max_cached_requests": 10_000}
    )
    assert config == SuffixDecodingConfig(max_cached_requests=10_000)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown key 'suffix_decoding_depth'"):
        parse_speculative_config({"method": "suffix", "suffix_decoding_depth": 3})
    with pytest.raises(ConfigError, match=r"method 'suffix' has no form as a list"):
        parse_speculative_config([10, 2], "suffix")


def test_requests() -> None:
    kwargs, depth, _ = resolve_speculation(SamplingParams(max_draft_len=5, adaptive=False), OWN)
    assert kwargs == {"speculative": True, "max_draft_len": 5, "adaptive": False} and depth == 5
    own = SuffixDecodingConfig(max_draft_len=3, max_tree_depth=30, max_spec_factor=2.0)
    kwargs, _, _ = resolve_speculation(SamplingParams(speculative_config=own), OWN)
    assert kwargs["max_draft_len"] == 3
    with pytest.raises(RequestError, match="max_draft_len = 13 is greater than the engine's 12"):
        resolve_speculation(SamplingParams(max_draft_len=13), OWN)
    with pytest.raises(RequestError, match="this engine decodes with suffix decoding"):
        resolve_speculation(SamplingParams(lookahead_config=(4, 3, 4)), OWN)
    other = SuffixDecodingConfig(min_token_prob=0.3)
    with pytest.raises(RequestError, match=r"min_token_prob = 0\.3: the engine's"):
        resolve_speculation(SamplingParams(speculative_config=other), OWN)
