"""LLM(scheduler_config={"overlap_depth": ...}): what is asked, refused and told."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from method_cases import (
    GREEDY,
    HOST,
    PROMPTS,
    Folders,
    Where,
    at_every_depth,
    check,
    open_llm,
    texts_of,
)

from specdec_ext import (
    ConfigError,
    NGramDecodingConfig,
    ReDrafterDecodingConfig,
    RequestError,
    SamplingParams,
)
from specdec_ext.cli.common import add_llm_arguments, llm_kwargs


@at_every_depth
def test_draft_lengths_follow_the_schedule(models: Folders, where: Where) -> None:
    """The numbers of a lone request are those of the host."""
    spec = NGramDecodingConfig(4, adaptive=False, draft_len_schedule={1: 2, 2: 1})
    counts = []
    for place in (HOST, where):
        with open_llm(models, spec, place) as llm:
            texts = texts_of(llm, GREEDY, PROMPTS[3:4])
            stats = llm.get_metrics()["executor"]
            counts.append((texts, stats["num_draft_tokens"], stats["rows"]))
            texts_of(llm, GREEDY, PROMPTS[:3])
            assert llm.get_metrics()["executor"]["unspeculated_steps"] > 0
            check(llm)
    assert counts[0] == counts[1]


@at_every_depth
def test_a_stop_token_that_steps_in_flight_pass_ends_the_text(
    models: Folders, plain_texts: dict[str, Any], where: Where
) -> None:
    """What came after it is dropped and not counted."""
    text = plain_texts["greedy"][5]
    for stop in dict.fromkeys(text[2:20:3]):
        wanted = text[: text.index(stop) + 1]
        with open_llm(models, "lookahead", where) as llm:
            params = SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=[stop])
            assert texts_of(llm, params, PROMPTS[5:]) == [wanted]
            check(llm)
            assert llm.get_metrics()["generation_tokens"] == len(wanted)


def test_the_command_line_checks_before_a_model_is_loaded() -> None:
    parser = argparse.ArgumentParser()
    add_llm_arguments(parser)
    for drafting in (
        ["--lookahead-config", "[4,3,4]", "--no-adaptive"],
        ["--lookahead-config", "[4,3,4]"],
        ["--prompt-lookup-config", "[4,2]", "--prompt-lookup-style", "v1"],
        ["--redrafter", "--redrafter-no-greedy-search"],
    ):
        args = parser.parse_args(["--run-ahead", "1", "--no-enforce-eager", *drafting])
        settings = llm_kwargs(args)
        scheduler = settings["scheduler_config"]
        assert (scheduler.overlap_depth, scheduler.enforce_eager) == (1, False)
    assert isinstance(settings["speculative_config"], ReDrafterDecodingConfig)
    assert settings["speculative_config"].greedy_search is False


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ({"overlap_depth": 3}, "overlap_depth = 3"),
        ({"enforce_eager": "sometimes"}, "enforce_eager = 'sometimes': expected true or false"),
    ],
)
def test_what_does_not_go_together_is_refused(
    models: Folders, scheduler: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_llm(models, None, scheduler=scheduler)


@at_every_depth
def test_more_stop_ids_than_a_slot_holds_are_refused(models: Folders, where: Where) -> None:
    with open_llm(models, None, where) as llm:
        bad = SamplingParams(max_tokens=4, stop_token_ids=list(range(48)) + [0] * 220)
        with pytest.raises(RequestError, match="268 end and stop ids together, at most 256 fit"):
            llm.generate(PROMPTS[:2], [GREEDY, bad], use_tqdm=False)
        assert llm.get_metrics()["executor"]["steps"] == 0
