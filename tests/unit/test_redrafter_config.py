"""ReDrafter's configuration and a request's numbers: what is refused, and other spellings."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_ext import ConfigError, ReDrafterDecodingConfig, RequestError, SamplingParams


@pytest.mark.parametrize("name", ["redrafter_num_beams", "redrafter_draft_len_per_beam"])
def test_numbers_of_a_request(name: str) -> None:
    for value in (0, -1, 128, 1.0, True, "2"):
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})
    with pytest.raises(RequestError, match=f"speculative = False but {name}"):
        SamplingParams(speculative=False, **{name: 2})
    assert SamplingParams.from_dict({name: 3}).speculative_config == {name: 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 0}, r"num_beams = 0: out of range, allowed 1\.\.127"),
        ({"draft_len_per_beam": 0}, "draft_len_per_beam = 0: out of range"),
        ({"num_beams": -3}, "num_beams = -3"),
        ({"num_beams": 2.0}, "expected an integer"),
        ({"num_beams": 16, "draft_len_per_beam": 8}, "up to 128 drafts in one step, limit 127"),
        ({"num_beams": 128}, "num_beams = 128"),
        ({"greedy_search": 1}, "greedy_search = 1: expected true or false"),
        ({"adaptive": None}, "adaptive = None"),
        ({"model": 7}, "model = 7: expected the path"),
        ({"model": ""}, "model = ''"),
    ],
)
def test_a_bad_configuration_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReDrafterDecodingConfig(**{"model": "somewhere", **arguments})


def test_other_projects_spellings() -> None:
    from specdec_ext.config.parse import parse_speculative_config

    expected = ReDrafterDecodingConfig("d", 3, 2, greedy_search=False)
    for values in (
        {"method": "redrafter", "model": "d", "num_beams": 3, "draft_len_per_beam": 2,
         "greedy_search": False},
        {"speculative_decoding_mode": "explicit_draft_tokens", "redrafter_model": "d",
         "redrafter_num_beams": 3, "redrafter_draft_len_per_beam": 2,
         "redrafter_greedy_search": False},
        '{"decoding_type": "ReDrafter", "speculative_model": "d", "beam_width": 3, '
        '"redrafter-draft-len-per-beam": 2, "redrafter-greedy-search": false}',
    ):  # fmt: skip
        assert parse_speculative_config(values) == expected
    assert expected.max_draft_len == 6 and expected.max_draft_path_len == 2
    assert expected.to_dict()["method"] == "redrafter"
    with pytest.raises(ConfigError, match="unknown key 'redrafter_beams'"):
        parse_speculative_config({"method": "redrafter", "redrafter_beams": 3})
    with pytest.raises(ConfigError, match="model is given twice"):
        parse_speculative_config({"method": "redrafter", "model": "a", "redrafter_model": "b"})
