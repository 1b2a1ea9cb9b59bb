"""SamplingParams.speculative_config and its other spellings, against engines of every method."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from specdec_ext import (
    DraftTargetDecodingConfig,
    ExternalDraftTokensConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    ReDrafterDecodingConfig,
    RequestError,
    SamplingParams,
    UserDrafterConfig,
)
from specdec_ext.request.speculation import resolve_speculation
from specdec_ext.request.speculative_config import SPELLINGS

TREE = [[0], [1], [0, 0]]
SMALL = [[0], [0, 0]]


class Silent:
    def propose(self, history: list[int], budget: int) -> list[int]:
        return []


USER = Silent()


@pytest.fixture
def engines(tmp_path: Path) -> dict[str, Any]:
    return {
        "lookahead": LookaheadDecodingConfig(4, 3, 4),
        "ngram": NGramDecodingConfig(8, 3, is_keep_all=False),
        "draft_target": DraftTargetDecodingConfig("m", 6),
        "medusa": MedusaDecodingConfig(tmp_path, TREE, num_medusa_heads=3),
        "redrafter": ReDrafterDecodingConfig("m", 4, 3),
        "user_provided": UserDrafterConfig(USER, 8),
    }


# Method, the old spelling, the same as an object, what the executor and the drafter are told.
EQUAL: list[tuple[str, dict[str, Any], Any, dict[str, Any]]] = [
    (
        "lookahead",
        {"lookahead_config": (2, 2, 1)},
        LookaheadDecodingConfig(2, 2, 1),
        {"lookahead": (2, 2, 1)},
    ),
    (
        "lookahead",
        {"lookahead_config": "[4,3,4]", "adaptive": False},
        LookaheadDecodingConfig(4, 3, 4, adaptive=False),
        {"lookahead": (4, 3, 4), "adaptive": False},
    ),
    ("ngram", {"max_draft_len": 3}, NGramDecodingConfig(3), {"max_draft_len": 3}),
    (
        "ngram",
        {"max_draft_len": 8, "adaptive": False},
        {"method": "ngram", "max_draft_len": 8, "adaptive": False},
        {"max_draft_len": 8, "adaptive": False},
    ),
    (
        "draft_target",
        {"max_draft_len": 2, "use_draft_logits": False},
        DraftTargetDecodingConfig("m", 2, use_draft_logits=False),
        {"max_draft_len": 2, "use_draft_logits": False},
    ),
    ("medusa", {"medusa_choices": SMALL}, SMALL, {"max_draft_len": 2}),
    (
        "redrafter",
        {"redrafter_num_beams": 2, "redrafter_draft_len_per_beam": 2},
        ReDrafterDecodingConfig("m", 2, 2),
        {"max_draft_len": 4, "num_beams": 2, "length": 2},
    ),
    ("user_provided", {"max_draft_len": 5}, UserDrafterConfig(USER, 5), {"max_draft_len": 5}),
]


@pytest.mark.parametrize(("method", "old", "config", "told"), EQUAL)
def test_every_spelling_says_the_same(
    engines: dict[str, Any], method: str, old: dict[str, Any], config: Any, told: dict[str, Any]
) -> None:
    engine = engines[method]
    if method == "medusa":
        config = dataclasses.replace(engine, medusa_choices=config)
    results = [
        resolve_speculation(params, engine)
        for params in (
            SamplingParams(speculative_config=config),
            SamplingParams(**old),
            SamplingParams(speculative_config=old),
            SamplingParams(speculative=True, **old),
            SamplingParams.from_dict(old),
            dataclasses.replace(SamplingParams(max_tokens=3), **old),
            dataclasses.replace(SamplingParams(**old), max_tokens=3),
            dataclasses.replace(SamplingParams(speculative_config=config), max_tokens=3),
        )
    ]
    assert all(result == results[0] for result in results)
    kwargs, _, options = results[0]
    assert kwargs["speculative"] is True
    assert {name: {**options, **kwargs}[name] for name in told} == told
    # Left alone, the engine's own numbers hold; its limits are no demand of a request.
    assert resolve_speculation(SamplingParams(), engine) == resolve_speculation(
        SamplingParams(speculative_config=engine), engine
    )


@pytest.mark.parametrize("off", [
    {"speculative_config": False}, {"speculative": False}, {"speculative_config": "none"},
    {"speculative": False, "adaptive": True}, {"speculative_config": {"speculative": False}},
])  # fmt: skip
def test_off(engines: dict[str, Any], off: dict[str, Any]) -> None:
    params = SamplingParams(**off)
    assert params.speculative_config is False
    for engine in (None, *engines.values()):
        assert resolve_speculation(params, engine) == ({"speculative": False}, 0, {})
    # What a request said before gives way to a later word.
    for before in ({"max_draft_len": 3}, {"speculative_config": {"max_draft_len": 3}}):
        again = dataclasses.replace(SamplingParams(**before), speculative=False)
        assert again.speculative_config is False


def test_a_later_word_replaces_an_earlier_one() -> None:
    params = SamplingParams(max_draft_len=3, adaptive=False)
    again = dataclasses.replace(params, max_draft_len=2)
    assert again.speculative_config == {"max_draft_len": 2, "adaptive": False}
    assert params.speculative_config == {"max_draft_len": 3, "adaptive": False}
    assert dataclasses.replace(again, speculative_config=None).speculative_config is None
    assert dataclasses.replace(again, adaptive=None).speculative_config == {"max_draft_len": 2}
    none = dataclasses.replace(again, adaptive=None, max_draft_len=None)
    assert none == SamplingParams()


@pytest.mark.parametrize(("method", "config", "message"), [
    ("lookahead", LookaheadDecodingConfig(5, 3, 4), r"max_window_size = 5 .* engine's 4"),
    ("ngram", NGramDecodingConfig(9), r"max_draft_len = 9 is greater than the engine's 8"),
    ("draft_target", DraftTargetDecodingConfig("m", 7), "max_draft_len = 7 .* engine's 6"),
    ("redrafter", ReDrafterDecodingConfig("m", 5, 3), "num_beams = 5 .* num_beams = 4"),
    ("redrafter", ReDrafterDecodingConfig("m", 4, 4), "per_beam = 4 .* = 3"),
    ("user_provided", UserDrafterConfig(USER, 9), "max_draft_len = 9 .* engine's 8"),
    ("user_provided", UserDrafterConfig(Silent(), 8), r"speculative_config\.drafter"),
    ("ngram", NGramDecodingConfig(3, 4), r"max_matching_ngram_size = 4: the engine's .* is 3"),
    ("ngram", NGramDecodingConfig(3, is_public_pool=True), "is_public_pool = True: the engine's"),
    ("draft_target", DraftTargetDecodingConfig("n", 3), r"model = 'n': the engine's .* is 'm'"),
    ("draft_target", DraftTargetDecodingConfig("m", 3, top_k=2), "top_k = 2: the engine's"),
    ("redrafter", ReDrafterDecodingConfig("m", 2, 2, greedy_search=False), "greedy_search"),
    ("ngram", DraftTargetDecodingConfig("m", 3), "of method 'draft_target', this .* 'ngram'"),
    ("redrafter", {"method": "ngram"}, "of method 'ngram', this engine decodes with 'redrafter'"),
    ("ngram", LookaheadDecodingConfig(2, 2, 1), "decodes with prompt lookup; set max_draft_len"),
    ("lookahead", {"max_draft_len": 2}, "set lookahead_config instead"),
    ("lookahead", {"medusa_choices": SMALL}, "decodes with lookahead; remove it"),
    ("ngram", {"redrafter_num_beams": 2}, "decodes with 'ngram', not 'redrafter'"),
    ("medusa", {"use_draft_logits": True}, "this engine has no draft model"),
])  # fmt: skip
def test_what_is_not_within_the_engine_is_refused(
    engines: dict[str, Any], method: str, config: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        resolve_speculation(SamplingParams(speculative_config=config), engines[method])


@pytest.mark.parametrize("config", [
    True, {"speculative": True}, {"max_draft_len": 2}, NGramDecodingConfig(), "lookahead",
    [2, 2, 1], {"medusa_choices": SMALL}, {"use_draft_logits": False}, {"adaptive": True},
])  # fmt: skip
def test_an_engine_without_speculation_refuses_it(config: Any) -> None:
    with pytest.raises(RequestError, match=r"no speculative_config|no draft model"):
        resolve_speculation(SamplingParams(speculative_config=config), None)


@pytest.mark.parametrize(("given", "message"), [
    ({"speculative_config": 3}, "speculative_config = 3"),
    ({"speculative_config": "eagle"}, "eagle"),
    ({"speculative_config": {"max_draft_length": 3}}, "speculative_config"),
    ({"speculative_config": {"max_draft_len": 128}}, "max_draft_len = 128"),
    ({"speculative_config": {"method": "ngram", "max_draft_len": 0}}, "max_draft_len = 0"),
    ({"speculative_config": {"speculative": 1}}, "speculative = 1"),
    ({"speculative_config": NGramDecodingConfig(max_concurrency=2)}, "option of the engine"),
    ({"speculative_config": NGramDecodingConfig(), "max_draft_len": 3}, "alone"),
    ({"speculative_config": {"max_draft_len": 3}, "max_draft_len": 4}, "alone"),
    ({"speculative_config": False, "max_draft_len": 4}, "alone"),
    ({"speculative_config": False, "speculative": True}, "alone"),
    ({"speculative_config": True, "speculative": False}, "alone"),
    ({"speculative": False, "medusa_choices": SMALL}, "speculative = False but medusa_choices"),
    ({"speculative": "no"}, "speculative = 'no'"),
])  # fmt: skip
def test_what_contradicts_itself_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**given)


def test_the_spellings_are_keywords_and_no_fields() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert not names & {*SPELLINGS, "best_of", "beam_width", "guided_decoding"}
    assert len(SPELLINGS) == 8
    for name in SPELLINGS:
        assert SamplingParams(**{name: None}) == SamplingParams()
        assert not hasattr(SamplingParams(), name)
    with pytest.raises(TypeError, match="max_draft_length"):
        SamplingParams(max_draft_length=3)  # type: ignore[call-arg]


def test_the_two_names_of_decoding_on() -> None:
    for given, on in (({}, False), ({"go_on": True}, True), ({"continue_decoding": True}, True)):
        draft = ExternalDraftTokensConfig([1, 2], **given)
        assert draft.continue_decoding is on
        assert SamplingParams(external_draft={"tokens": [1, 2], **given}).external_draft == draft
    with pytest.raises(RequestError, match="two names of one switch"):
        ExternalDraftTokensConfig([1], continue_decoding=True, go_on=False)
    with pytest.raises(RequestError, match="continue_decoding = 1"):
        ExternalDraftTokensConfig([1], go_on=1)
