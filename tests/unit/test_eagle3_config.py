"""Eagle3DecodingConfig: its limits, other projects' spellings, what a request may choose."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_ext import Eagle3DecodingConfig, RequestError, SamplingParams
from specdec_ext.config.build_check import check_build
from specdec_ext.config.parse import parse_speculative_config
from specdec_ext.config.sources import CompositeDecodingConfig
from specdec_ext.errors import ConfigError
from specdec_ext.request.speculation import resolve_speculation


def test_defaults() -> None:
    config = Eagle3DecodingConfig("head")
    assert (config.max_draft_len, config.top_k, config.max_draft_depth) == (8, 4, 4)
    assert (config.max_draft_path_len, config.rows_of_pass, config.adaptive) == (4, 13, True)
    chain = Eagle3DecodingConfig("head", max_draft_len=5, top_k=1)
    assert (chain.max_draft_depth, chain.rows_of_pass) == (5, 1)
    assert Eagle3DecodingConfig("head", max_draft_len=2).max_draft_depth == 2
    # As deep as 4 unless the last pass would need more than 128 rows.
    for top_k, depth, rows in ((42, 4, 127), (43, 3, 87), (63, 3, 127), (64, 2, 65)):
        wide = Eagle3DecodingConfig("head", max_draft_len=100, top_k=top_k)
        assert (wide.max_draft_depth, wide.rows_of_pass) == (depth, rows)


@pytest.mark.parametrize(
    "given",
    [
        {"method": "eagle3", "model": "head", "num_speculative_tokens": 5},
        {"method": "EAGLE3", "draft_model": "head", "max_draft_len": 5},
        {"decoding_type": "Eagle3", "speculative_model_dir": "head", "max_draft_len": 5},
        {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "head",
         "speculative_num_draft_tokens": 6},
        {"spec_type": "draft-eagle3", "spec_draft_model": "head", "spec_draft_n_max": 5},
    ],
)  # fmt: skip
def test_spellings(given: dict[str, Any]) -> None:
    assert parse_speculative_config(given) == Eagle3DecodingConfig("head", max_draft_len=5)


def test_sglangs_tree() -> None:
    """It counts levels, and the golden token among the tokens."""
    config = parse_speculative_config(
        {"speculative_algorithm": "EAGLE3", "model": "head", "speculative_num_steps": 3,
         "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
    )  # fmt: skip
    assert config == Eagle3DecodingConfig("head", max_draft_len=15, top_k=4, max_draft_depth=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": 3}, "model = 3: expected the folder of an EAGLE-3 head"),
        ({"model": ""}, "model = ''"),
        ({"max_draft_len": 0}, "max_draft_len = 0"),
        ({"max_draft_len": 128}, "max_draft_len = 128"),
        ({"top_k": 65}, "top_k = 65"),
        ({"max_draft_depth": 9}, "max_draft_depth = 9"),
        ({"top_k": 1, "max_draft_depth": 2}, "a chain is as deep as it is long"),
        ({"max_draft_len": 100, "top_k": 32, "max_draft_depth": 5}, "needs 129 rows"),
        ({"adaptive": 1}, "adaptive = 1"),
        ({"use_draft_logits": None}, "use_draft_logits = None"),
    ],
)
def test_refusals(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Eagle3DecodingConfig(**{"model": "head", **given})


def test_the_mode_of_an_engine() -> None:
    config = {"model": "head", "method": "eagle3"}
    assert check_build(config, None, "eagle3") == Eagle3DecodingConfig("head")
    assert check_build(None, None, "eagle3") == Eagle3DecodingConfig(), "the shipped head"
    with pytest.raises(ConfigError, match="make the two agree"):
        check_build(config, None, "medusa")


def test_what_a_request_may_choose() -> None:
    engine = Eagle3DecodingConfig("head", max_draft_len=6)
    kwargs, depth, options = resolve_speculation(SamplingParams(max_draft_len=3), engine)
    assert (kwargs["max_draft_len"], depth) == (3, 3)
    assert options == {"adaptive": True, "use_draft_logits": True, "acceptance": "exact_match"}
    rejection = SamplingParams(temperature=1.0, acceptance="rejection", use_draft_logits=False)
    assert resolve_speculation(rejection, engine)[2]["use_draft_logits"] is False
    asked = SamplingParams(speculative_config=Eagle3DecodingConfig("head", max_draft_len=2))
    assert resolve_speculation(asked, engine)[0]["max_draft_len"] == 2
    assert resolve_speculation(SamplingParams(max_draft_len=0), engine)[0] == {"speculative": False}
    with pytest.raises(RequestError, match="max_draft_len = 7 is greater than the engine's 6"):
        resolve_speculation(SamplingParams(max_draft_len=7), engine)


def test_beside_suffix_decoding_nothing_is_drawn() -> None:
    config = parse_speculative_config(["suffix", {"method": "eagle3", "model": "head"}])
    assert isinstance(config, CompositeDecodingConfig)
    assert config.drafter == Eagle3DecodingConfig("head", use_draft_logits=False)
