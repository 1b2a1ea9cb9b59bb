"""Configurations of several sources, "auto", and what a request may say of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec_ext import (
    CompositeDecodingConfig,
    ConfigError,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
    ReDrafterDecodingConfig,
    RequestError,
    SamplingParams,
    SuffixDecodingConfig,
    UnsupportedConfigError,
)
from specdec_ext.cli.common import llm_kwargs
from specdec_ext.cli.generate import add_arguments
from specdec_ext.cli.parser import SpecdecParser, normalize_argv
from specdec_ext.config.build_check import check_build
from specdec_ext.config.methods import DraftTargetDecodingConfig
from specdec_ext.config.parse import parse_speculative_config
from specdec_ext.config.sources import AutoDecodingConfig, method_of
from specdec_ext.request.speculation import resolve_speculation

NETWORK = ReDrafterDecodingConfig("folder", 3, 4)
BOTH = CompositeDecodingConfig(sources=(SuffixDecodingConfig(), NETWORK))


@pytest.mark.parametrize(
    "value",
    [
        BOTH,
        [NETWORK, "suffix"],
        ["suffix", {"method": "redrafter", "model": "folder", "num_beams": 3,
                    "draft_len_per_beam": 4}],
        (SuffixDecodingConfig(), NETWORK),
        '["suffix", {"method": "redrafter", "model": "folder", "num_beams": 3, "draft_len": 4}]',
        {"method": "composite", "sources": ["suffix", NETWORK]},
    ],
)  # fmt: skip
def test_forms(value: Any) -> None:
    config = parse_speculative_config(value)
    assert config == BOTH
    assert isinstance(config, CompositeDecodingConfig)
    assert (config.max_draft_len, config.max_draft_path_len) == (36, 24)
    assert (config.suffix, method_of(config)) == (SuffixDecodingConfig(), NETWORK)


def test_one_in_a_list_is_that_method_and_numbers_are_none() -> None:
    assert parse_speculative_config(["suffix"]) == SuffixDecodingConfig()
    assert parse_speculative_config([7, 7, 7]) == LookaheadDecodingConfig(7, 7, 7)
    assert parse_speculative_config([10, 2]) == NGramDecodingConfig(10, 2)


def test_a_dict_that_was_written_is_read_again() -> None:
    assert parse_speculative_config(json.dumps({"method": "composite", **BOTH.to_dict()})) == BOTH


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["suffix", "ngram"], "name these two"),
        (["medusa", "redrafter"], "name these two"),
        (["suffix", "lookahead", "redrafter"], "name these two"),
        (["suffix", "none"], "'none' in a list"),
        (["suffix", {"method": "lookahead", "max_concurrency": 3}], "an option of the whole"),
        (["suffix", "mtp"], "does not have this method"),
        (["suffix", {"method": "eagle3", "model": 3}], "expected the folder of an EAGLE-3 head"),
        ("composite", "expected a configuration object"),
    ],
)
def test_refusals(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_speculative_config(value)


def test_one_that_is_fixed_fixes_the_whole_and_draft_models_draw_nothing() -> None:
    fixed = CompositeDecodingConfig(
        sources=(SuffixDecodingConfig(adaptive=False), DraftTargetDecodingConfig("folder"))
    )
    assert not fixed.adaptive and not any(source.adaptive for source in fixed.sources)
    assert not method_of(fixed).use_draft_logits


def test_together_they_are_bounded() -> None:
    wide = CompositeDecodingConfig(sources=(SuffixDecodingConfig(120), NETWORK))
    assert wide.max_draft_len == 127


def test_auto() -> None:
    auto = AutoDecodingConfig()
    assert parse_speculative_config("auto") == parse_speculative_config("AUTO") == auto
    assert auto.with_drafter(None) == SuffixDecodingConfig()
    assert auto.with_drafter(NETWORK) == BOTH
    changed = AutoDecodingConfig(max_draft_len=4, adaptive=False, max_concurrency=8)
    expected = SuffixDecodingConfig(4, adaptive=False, max_concurrency=8)
    assert changed.with_drafter(None) == expected
    both = changed.with_drafter(NETWORK)
    assert isinstance(both, CompositeDecodingConfig)
    assert (both.max_concurrency, both.adaptive, both.suffix.max_draft_len) == (8, False, 4)


def test_auto_gives_way_to_the_mode() -> None:
    assert check_build("auto", None, None) == AutoDecodingConfig()
    assert check_build("auto", 7, None) == AutoDecodingConfig(max_draft_len=7)
    assert check_build("auto", 0, None) is None
    assert check_build("auto", None, "none") is None
    assert check_build("auto", None, "lookahead_decoding") == LookaheadDecodingConfig()
    assert check_build("auto", 6, "ngram") == NGramDecodingConfig(6)
    assert check_build(None, None, "auto") == AutoDecodingConfig()
    with pytest.raises(ConfigError, match="make the two agree"):
        check_build("suffix", None, "auto")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], AutoDecodingConfig()),
        (["--no-speculation"], None),
        (["--no-adaptive"], AutoDecodingConfig(adaptive=False)),
        (["--max-concurrency", "3"], AutoDecodingConfig(max_concurrency=3)),
        (["--speculative-config", "[suffix, {method: lookahead}]"],
         CompositeDecodingConfig(sources=(SuffixDecodingConfig(), LookaheadDecodingConfig()))),
        (["--suffix"], SuffixDecodingConfig()),
    ],
)  # fmt: skip
def test_command_line(argv: list[str], expected: Any) -> None:
    parser = SpecdecParser(prog="specdec generate")
    add_arguments(parser)
    args = parser.parse_args(normalize_argv(argv))
    assert llm_kwargs(args)["speculative_config"] == expected


# -- requests -------------------------------------------------------------------------------------


def asked(value: Any, **params: Any) -> tuple[dict[str, Any], int, dict[str, Any]]:
    return resolve_speculation(SamplingParams(speculative_config=value, **params), BOTH)


def test_a_request_chooses_among_the_sources() -> None:
    kwargs, depth, options = asked(None)
    assert kwargs == {"speculative": True, "max_draft_len": 12, "suffix_draft_len": 24}
    assert depth == 24 and options["num_beams"] == 3
    assert asked("auto") == asked(None)
    kwargs, depth, options = asked("suffix")
    assert kwargs == {"speculative": True, "max_draft_len": 0, "suffix_draft_len": 24}
    assert (depth, options) == (24, {})
    kwargs, depth, _ = asked({"method": "redrafter", "num_beams": 2, "draft_len_per_beam": 4})
    assert kwargs == {"speculative": True, "max_draft_len": 8, "suffix_draft_len": 0}
    assert depth == 4
    assert asked(False)[0] == {"speculative": False}
    assert asked({"max_draft_len": 0})[0] == {"speculative": False}
    kwargs, _, _ = asked({"max_draft_len": 3})
    assert kwargs == {"speculative": True, "max_draft_len": 3, "suffix_draft_len": 3}
    assert asked({"adaptive": False})[0]["adaptive"] is False
    kwargs, _, options = asked({"redrafter_num_beams": 1})
    assert (kwargs["max_draft_len"], options["num_beams"]) == (4, 1)


def test_a_request_of_lookahead_beside_suffix() -> None:
    engine = CompositeDecodingConfig(sources=(SuffixDecodingConfig(), LookaheadDecodingConfig()))
    params = SamplingParams(speculative_config="suffix")
    kwargs, _, _ = resolve_speculation(params, engine)
    assert kwargs == {"speculative": True, "lookahead": (1, 1, 0), "suffix_draft_len": 24}


@pytest.mark.parametrize(
    ("value", "params", "message"),
    [
        ("ngram", {}, "decodes with 'suffix' and 'redrafter'"),
        ({"max_draft_len": 37}, {}, "greater than the engine's 36"),
        ({"method": "suffix", "max_draft_len": 25}, {}, "greater than the engine's 24"),
        ({"redrafter_num_beams": 4}, {}, "num_beams = 3"),
        ({"medusa_choices": [[0]]}, {}, "decodes with ReDrafter"),
        ({"use_draft_logits": True}, {}, "cannot share a tree"),
        (None, {"acceptance": "best_beam", "temperature": 1.0}, "several sources"),
    ],
)
def test_a_request_is_refused(value: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        asked(value, **params)


def test_sources_on_a_device_are_refused() -> None:
    from specdec_ext.engine.models import ModelLoader

    class Device:
        is_cpu, on_cuda, name = False, False, "cuda:0"

    loader: Any = ModelLoader.__new__(ModelLoader)
    loader._speculative, loader._place = BOTH, Device()
    with pytest.raises(UnsupportedConfigError, match="beside ReDrafter on cuda:0"):
        loader._refuse_beside_operations()
    loader._speculative = CompositeDecodingConfig(
        sources=(SuffixDecodingConfig(), LookaheadDecodingConfig())
    )
    loader._refuse_beside_operations()
