"""Options of every method: schedules of draft lengths and synthetic acceptance; no torch needed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from specdec_ext import (
    ConfigError,
    DraftTargetDecodingConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
    ReDrafterDecodingConfig,
    RequestError,
    SamplingParams,
    UnsupportedConfigError,
    UserDrafterConfig,
)
from specdec_ext.cli import main
from specdec_ext.config.parse import parse_speculative_config


class Drafter:
    def propose(self, history: list[int], budget: int) -> list[int]:
        return []


def make(name: str, **options: Any) -> Any:
    return {
        "lookahead": lambda: LookaheadDecodingConfig(7, 7, 7, **options),
        "ngram": lambda: NGramDecodingConfig(8, 2, **options),
        "draft_target": lambda: DraftTargetDecodingConfig("d", 8, **options),
        "redrafter": lambda: ReDrafterDecodingConfig("r", 3, 5, **options),
        "user": lambda: UserDrafterConfig(Drafter(), 8, **options),
    }[name]()


NAMES = ["lookahead", "ngram", "draft_target", "redrafter", "user"]
DEPTH = {"lookahead": 6, "ngram": 8, "draft_target": 8, "redrafter": 5, "user": 8}
LENGTH = {"lookahead": 83, "ngram": 8, "draft_target": 8, "redrafter": 15, "user": 8}


@pytest.mark.parametrize("name", NAMES)
def test_schedules(name: str) -> None:
    config = make(name, draft_len_schedule={8: 2, 4: 8})
    assert config.draft_len_schedule == {4: 8, 8: 2}
    assert config.draft_len_steps == [(4, 8), (8, 2)]
    assert make(name, max_concurrency=3).draft_len_steps == [(3, LENGTH[name])]
    assert make(name).draft_len_steps == []
    assert hash(config) is not None
    assert make(name, draft_len_schedule={"4": 0}).draft_len_schedule == {4: 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_len_schedule": {4: 1}, "max_concurrency": 4}, "both set"),
        ({"draft_len_schedule": {}}, "expected 1..64 entries"),
        ({"draft_len_schedule": [4, 2]}, "expected 1..64 entries"),
        ({"draft_len_schedule": {i + 1: 1 for i in range(65)}}, "expected 1..64 entries"),
        ({"draft_len_schedule": {0: 1}}, "key = 0: out of range"),
        ({"draft_len_schedule": {"x": 1}}, "key = 'x': expected an integer"),
        ({"draft_len_schedule": {True: 1}}, "expected an integer"),
        ({"draft_len_schedule": {4: -1}}, r"\[4\] = -1: out of range"),
        ({"draft_len_schedule": {4: 84}}, r"\[4\] = 84: out of range.*max_draft_len = \d+"),
        ({"draft_len_schedule": {4: 1, "4": 2}}, "4 is given twice"),
        ({"max_concurrency": 0}, "max_concurrency = 0: out of range"),
        ({"max_concurrency": 2.0}, "expected an integer"),
        ({"synthetic_acceptance_length": 0.9}, "synthetic_acceptance_length = 0.9: out of range"),
        ({"synthetic_acceptance_length": 9.5}, "a step of this configuration at most"),
        ({"synthetic_acceptance_length": float("nan")}, "must be finite"),
        ({"synthetic_acceptance_length": "2"}, "expected a number"),
        ({"synthetic_acceptance_length": 2, "synthetic_acceptance_rates": [0.5]}, "both set"),
        ({"synthetic_acceptance_rates": []}, "has 0 entries"),
        ({"synthetic_acceptance_rates": [0.1] * 9}, "has 9 entries"),
        ({"synthetic_acceptance_rates": 0.5}, "expected a list"),
        ({"synthetic_acceptance_rates": "0.5"}, "expected a list"),
        ({"synthetic_acceptance_rates": [0.5, 0.6]}, r"rates\[1\] = 0.6: out of range.*not rise"),
        ({"synthetic_acceptance_rates": [1.5]}, r"rates\[0\] = 1.5: out of range"),
        ({"synthetic_acceptance_rates": [-0.5]}, r"rates\[0\] = -0.5: out of range"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
def test_refusals_name_field_and_limit(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make(name, **options)
    assert type(make(name)).__name__ in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_synthetic_rates_of_a_length(name: str) -> None:
    for length, rates in (
        (1.0, (0.0,)), (1.25, (0.25,)), (2.0, (1.0,)), (3.5, (1.0, 1.0, 0.5)),
        (DEPTH[name] + 1, (1.0,) * DEPTH[name]),
    ):  # fmt: skip
        config = make(name, synthetic_acceptance_length=length)
        assert config.synthetic_rates == pytest.approx(rates)
        said = config.synthetic_acceptance
        assert said["mean_acceptance_length"] == pytest.approx(length)
    config = make(name, synthetic_acceptance_rates=[0.8, 0.5])
    assert config.synthetic_acceptance["mean_acceptance_length"] == pytest.approx(2.3)
    assert make(name).synthetic_rates == ()
    assert make(name).synthetic_acceptance is None


def test_dictionaries_round_trip_and_say_nothing_of_what_is_not_set() -> None:
    plain = NGramDecodingConfig(8, 2)
    assert not {"draft_len_schedule", "synthetic_acceptance_rates"} & plain.to_dict().keys()
    for options in (
        {"draft_len_schedule": {4: 8, 16: 2}}, {"max_concurrency": 7},
        {"synthetic_acceptance_length": 2.5}, {"synthetic_acceptance_rates": (0.5, 0.25)},
    ):  # fmt: skip
        config = NGramDecodingConfig(8, 2, **options)  # type: ignore[arg-type]
        assert parse_speculative_config(json.dumps(config.to_dict())) == config
        assert dataclasses.replace(config, adaptive=False).to_dict() == {
            **config.to_dict(), "adaptive": False,
        }  # fmt: skip


def test_other_projects_spellings() -> None:
    vllm = {
        "method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.5,
    }  # fmt: skip
    config = parse_speculative_config(vllm)
    assert config == NGramDecodingConfig(4, synthetic_acceptance_length=2.5)
    assert parse_speculative_config({"method": "ngram", "spec-synth-len": 2}) == (
        NGramDecodingConfig(synthetic_acceptance_length=2)
    )
    standard = {"method": "ngram", "rejection_sample_method": "standard"}
    assert parse_speculative_config(standard) == NGramDecodingConfig()
    with pytest.raises(ConfigError, match="give synthetic_acceptance_length"):
        parse_speculative_config({"method": "ngram", "rejection_sample_method": "synthetic"})
    with pytest.raises(UnsupportedConfigError, match="rejection_sample_method = 'block'"):
        parse_speculative_config({"method": "ngram", "rejection_sample_method": "block"})
    with pytest.raises(UnsupportedConfigError, match="rejection_sample_method = 'standard'"):
        parse_speculative_config({**vllm, "rejection_sample_method": "standard"})


def test_a_request_cannot_bring_options_of_the_engine() -> None:
    for options in ({"max_concurrency": 2}, {"synthetic_acceptance_length": 2.0}):
        config = LookaheadDecodingConfig(**options)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="sets an option of the engine"):
            SamplingParams(lookahead_config=config)


def test_an_external_loop_has_no_engine_to_set_options_of() -> None:
    from specdec_ext.orchestrate.prompt_lookup import _config

    for options in ({"max_concurrency": 2}, {"draft_len_schedule": {2: 4}},
                    {"synthetic_acceptance_length": 2.0}):  # fmt: skip
        with pytest.raises(ConfigError, match="options of an engine"):
            _config(NGramDecodingConfig(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--no_speculation", "--max_concurrency", "4"], 2, "--no-speculation with --max-concur"),
        (["--no_speculation", "--synthetic_acceptance_length", "2"], 2, "with --synthetic-accept"),
        (["--no_speculation", "--suffix"], 2, "--no-speculation with a method"),
        (["--lookahead_config", "[7,7,7]", "--draft_len_schedule", "{4:90}"], 4, "= 90: out of"),
        (["--lookahead_config", "[7,7,7]", "--draft_len_schedule", "4"], 4, "expected 1..64"),
        (["--prompt_lookup_config", "[4,2]", "--synthetic_acceptance_rates", "[0.5,x]"], 4,
         r"rates\[1\] = 'x'"),
        (["--prompt_lookup_config", "[4,2]", "--synthetic_acceptance_length", "6"], 4, "= 6"),
        (["--prompt_lookup_config", "[4,2]", "--max_concurrency", "2", "--prompt_lookup_style",
          "v1"], 2, "need v2"),
        (["--prompt_lookup_config", "[4,2]", "--synthetic_acceptance_length", "2", "--verify"], 2,
         "--verify with synthetic acceptance"),
    ],
)  # fmt: skip
def test_flags_are_refused(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    assert main(["generate", "--input_text", "x", *argv]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err), captured.err


def test_flags_reach_the_configuration(tmp_path: Path) -> None:
    from specdec_ext.cli.common import SpecdecParser, add_llm_arguments, llm_kwargs

    parser = SpecdecParser()
    add_llm_arguments(parser)

    def config(*argv: str) -> Any:
        args = parser.parse_args(["--prompt-lookup-config", "[8,2]", *argv])
        return llm_kwargs(args)["speculative_config"]

    assert config("--draft-len-schedule", "{4:8,16:2}").draft_len_steps == [(4, 8), (16, 2)]
    file = tmp_path / "schedule.json"
    file.write_text('{"2": 8}')
    assert config("--draft-len-schedule", str(file)).draft_len_steps == [(2, 8)]
    assert config("--max-concurrency", "5").draft_len_steps == [(5, 8)]
    assert config("--synthetic-acceptance-rates", "[0.5,0.25]").synthetic_rates == (0.5, 0.25)
