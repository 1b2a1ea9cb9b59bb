"""Sampling parameters: what is honoured, what is refused, and against which engine."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from specdec_ext.config.lookahead import LookaheadDecodingConfig
from specdec_ext.config.ngram import NGramDecodingConfig
from specdec_ext.config.parse import SpeculativeConfig
from specdec_ext.errors import CapacityError, RequestError, UnsupportedRequestError
from specdec_ext.request.resolve import EngineLimits, resolve_request
from specdec_ext.request.sampling_params import SamplingParams

VOCAB = 100


def limits(config: SpeculativeConfig | None = None, **changes: Any) -> EngineLimits:
    base = EngineLimits(
        vocab_size=VOCAB, max_seq_len=64, eos_token_ids=(2,), speculative_config=config,
        num_pages=100, tokens_per_block=16, seed=7,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_the_default_is_greedy_and_plain() -> None:
    params = SamplingParams()
    assert params.temperature == 0.0
    assert params.max_tokens == 16
    assert params.greedy
    resolved = resolve_request([1, 3], params, limits())
    assert resolved.submit_kwargs["speculative"] is False
    assert resolved.submit_kwargs["eos_token_ids"] == [2]
    assert resolved.submit_kwargs["seed"] == 7


@pytest.mark.parametrize(("field", "value"), [
    ("best_of", 3), ("beam_width", 4),
])  # fmt: skip
def test_what_this_version_cannot_do_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedRequestError, match=rf"SamplingParams\.{field}"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_off_values_of_sampling_are_accepted() -> None:
    for top_k in (-1, 0, 1):
        SamplingParams(temperature=0, top_p=1, top_k=top_k, min_p=0, n=1, best_of=1, beam_width=1)


@pytest.mark.parametrize(("field", "value"), [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", True), ("max_tokens", 1.0),
    ("max_tokens", "16"), ("max_tokens", 2**31),
    ("min_tokens", -1), ("min_tokens", 17),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("top_p", 1.5),
    ("top_p", 0.0), ("top_k", -2), ("top_k", 1.0), ("n", 0), ("n", 2),
    ("stop", ""), ("stop", [""]), ("stop", [1]), ("stop", b"x"), ("stop", ["x"] * 65),
    ("stop", "x" * 1025), ("stop", {"a": 1}),
    ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("stop_token_ids", [1.0]),
    ("stop_token_ids", "12"), ("stop_token_ids", 5), ("stop_token_ids", [2**31]),
    ("ignore_eos", 1), ("detokenize", None), ("skip_special_tokens", "no"),
    ("bad_words", "word"), ("bad_words", [""]), ("bad_words", [[]]), ("bad_words", [[-1]]),
    ("bad_words", [[True]]), ("bad_words", [["a"]]),
    ("logit_bias", [1]), ("logit_bias", {"x": 1.0}), ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: math.nan}), ("logit_bias", {1: 101.0}), ("logit_bias", {True: 1.0}),
    ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", {1: 2}),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.nan),
    ("repetition_penalty", True), ("repetition_penalty", 10**400),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", math.nan),
    ("logprobs", -1), ("logprobs", 21), ("logprobs", True),
    ("seed", 1.5), ("seed", 2**64), ("speculative", 1), ("adaptive", "yes"),
    ("max_draft_len", -1), ("max_draft_len", 128), ("cache_salt", 5), ("cache_salt", "x" * 257),
    ("lookahead_config", (0, 7, 7)), ("lookahead_config", "[10,2]"),
    ("lookahead_config", NGramDecodingConfig()), ("lookahead_config", (10, 9, 8)),
])  # fmt: skip
def test_malformed_values(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as info:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert not isinstance(info.value, UnsupportedRequestError)


def test_contradictions() -> None:
    for given, message in (
        ({"stop": "x", "detokenize": False}, "detokenize"),
        ({"speculative": False, "max_draft_len": 3}, "speculative = False"),
        ({"speculative": False, "lookahead_config": (4, 3, 4)}, "speculative = False"),
        ({"lookahead_config": (4, 3, 4), "max_draft_len": 3}, "only the one"),
        (
            {"lookahead_config": LookaheadDecodingConfig(adaptive=False), "adaptive": True},
            "only one",
        ),
    ):
        with pytest.raises(RequestError, match=message):
            SamplingParams(**given)  # type: ignore[arg-type]


def test_values_are_normalised_and_frozen() -> None:
    params = SamplingParams(
        stop="x", stop_token_ids=np.array([3, 4]), logit_bias={"5": 1}, max_tokens=np.int64(8),
        bad_words=["no", [7]], allowed_token_ids=[9, 9, 1], lookahead_config="[4,3,4]",
    )  # type: ignore[arg-type]  # fmt: skip
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == {5: 1.0}
    assert type(params.max_tokens) is int
    assert params.bad_words == ("no", (7,))
    assert params.allowed_token_ids == (1, 9)
    assert params.speculative_config == {"lookahead_config": LookaheadDecodingConfig()}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 5  # type: ignore[misc]
    # A copy with one change must survive its own normalised fields.
    again = dataclasses.replace(params, max_tokens=4)
    assert again.stop == ("x",) and again.logit_bias == {5: 1.0}


def test_a_misspelt_keyword_is_told_the_nearest() -> None:
    from specdec_ext import LookaheadDecodingConfig

    with pytest.raises(TypeError, match="'max_token'; did you mean 'max_tokens'"):
        SamplingParams(max_token=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'max_window'; did you mean 'max_window_size'"):
        LookaheadDecodingConfig(max_window=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'xyzzy'$"):
        SamplingParams(xyzzy=3)  # type: ignore[call-arg]


def test_from_dict() -> None:
    params = SamplingParams.from_dict(
        {"max_new_tokens": 5, "num_draft_tokens": 3, "Ignore-EOS": True, "random_seed": 1}
    )
    assert (params.max_tokens, params.speculative_config, params.seed) == (
        5, {"max_draft_len": 3}, 1
    )  # fmt: skip
    assert params.ignore_eos
    assert SamplingParams.from_dict({"disable_spec_decode": True}).speculative_config is False
    on = SamplingParams.from_dict({"disable_speculative_decoding": False})
    assert on.speculative_config == {"speculative": True}
    with pytest.raises(RequestError, match="did you mean 'max_tokens'"):
        SamplingParams.from_dict({"max_token": 5})
    with pytest.raises(RequestError, match="given twice"):
        SamplingParams.from_dict({"max_tokens": 5, "max_new_tokens": 6})
    with pytest.raises(UnsupportedRequestError, match="beam_width"):
        SamplingParams.from_dict({"num_beams": 2})
    with pytest.raises(RequestError, match="expected an object"):
        SamplingParams.from_dict([1])  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, VOCAB, True, 1.5, "1", None, 2**40])
def test_every_token_id_is_held_against_the_vocabulary(token: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt_token_ids\[1\]"):
        resolve_request([1, token, 2], SamplingParams(), limits())
    if type(token) is int and 0 <= token < 2**31:
        for params in (
            SamplingParams(stop_token_ids=[token]),
            SamplingParams(bad_words=[[1, token]]),
            SamplingParams(logit_bias={token: 1.0}),
            SamplingParams(allowed_token_ids=[token]),
        ):
            with pytest.raises(RequestError, match=r"0..99"):
                resolve_request([1], params, limits())


def test_prompt_lengths() -> None:
    with pytest.raises(RequestError, match="empty"):
        resolve_request([], SamplingParams(), limits())
    with pytest.raises(CapacityError, match="64 tokens, max_seq_len = 64"):
        resolve_request([1] * 64, SamplingParams(max_tokens=1), limits())
    assert resolve_request([1] * 63, SamplingParams(max_tokens=1), limits()).max_tokens == 1
    with pytest.raises(CapacityError, match="use max_tokens <= 4"):
        resolve_request([1] * 60, SamplingParams(max_tokens=5), limits())
    resolved = resolve_request([1] * 60, SamplingParams(max_tokens=None), limits())
    assert resolved.submit_kwargs["max_tokens"] == 4
    with pytest.raises(RequestError, match="min_tokens = 5"):
        resolve_request([1] * 60, SamplingParams(max_tokens=None, min_tokens=5), limits())


def test_a_request_larger_than_the_pool() -> None:
    config = NGramDecodingConfig(max_draft_len=10)
    small = limits(config, num_pages=2, tokens_per_block=16)
    params = SamplingParams(max_tokens=12)
    assert resolve_request([1] * 10, params, small)  # 10 + 12 + 10 drafts = 32 slots
    with pytest.raises(CapacityError, match=r"needs 3 KV pages of 16 tokens.*has 2"):
        resolve_request([1] * 11, params, small)
    plain = dataclasses.replace(params, speculative=False)
    assert resolve_request([1] * 11, plain, small)


def test_lookahead_triple_of_a_request() -> None:
    engine = limits(LookaheadDecodingConfig(4, 3, 4))
    resolved = resolve_request([1], SamplingParams(), engine)
    assert resolved.submit_kwargs["lookahead"] == (4, 3, 4)
    assert resolved.num_spec_tokens == 2
    smaller = resolve_request([1], SamplingParams(lookahead_config=(2, 2, 1)), engine)
    assert smaller.submit_kwargs["lookahead"] == (2, 2, 1)
    assert smaller.num_spec_tokens == 1
    for triple, name in (
        ((5, 3, 4), "max_window_size = 5"),
        ((4, 4, 4), "max_ngram_size = 4"),
        ((4, 3, 5), "max_verification_set_size = 5"),
    ):
        with pytest.raises(RequestError, match=f"{name}.*engine's"):
            resolve_request([1], SamplingParams(lookahead_config=triple), engine)  # type: ignore[arg-type]
    plain = resolve_request([1], SamplingParams(lookahead_config=(1, 1, 0)), engine)  # type: ignore[arg-type]
    assert plain.submit_kwargs["speculative"] is False
    with pytest.raises(RequestError, match="lookahead_config instead"):
        resolve_request([1], SamplingParams(max_draft_len=2), engine)


def test_draft_length_of_a_request() -> None:
    engine = limits(NGramDecodingConfig(max_draft_len=8))
    assert resolve_request([1], SamplingParams(), engine).submit_kwargs["max_draft_len"] == 8
    shorter = resolve_request([1], SamplingParams(max_draft_len=3, adaptive=False), engine)
    assert shorter.submit_kwargs["max_draft_len"] == 3
    assert shorter.submit_kwargs["adaptive"] is False
    none = resolve_request([1], SamplingParams(max_draft_len=0), engine)
    assert none.submit_kwargs["speculative"] is False
    with pytest.raises(RequestError, match=r"max_draft_len = 9.*8"):
        resolve_request([1], SamplingParams(max_draft_len=9), engine)
    with pytest.raises(RequestError, match="max_draft_len instead"):
        resolve_request([1], SamplingParams(lookahead_config=(2, 2, 1)), engine)  # type: ignore[arg-type]


def test_speculation_needs_an_engine_built_for_it() -> None:
    for params in (
        SamplingParams(speculative=True),
        SamplingParams(max_draft_len=2),
        SamplingParams(lookahead_config=(2, 2, 1)),  # type: ignore[arg-type]
    ):
        with pytest.raises(RequestError, match="no speculative_config"):
            resolve_request([1], params, limits())
    for config in (None, LookaheadDecodingConfig(), NGramDecodingConfig()):
        off = resolve_request([1], SamplingParams(speculative=False), limits(config))
        assert off.submit_kwargs["speculative"] is False
        assert off.num_spec_tokens == 0


class WordTokenizer:
    """Ids by first letter; a leading space is another token."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(c) - 31 if c != " " else 99 for c in text]


def test_bad_words_as_text() -> None:
    resolved = resolve_request(
        [1], SamplingParams(bad_words=["ab", [5, 6]]), limits(), WordTokenizer()
    )
    a, b = ord("a") - 31, ord("b") - 31
    assert resolved.submit_kwargs["bad_words"] == [[a, b], [99, a, b], [5, 6]]
    with pytest.raises(RequestError, match="needs a tokenizer"):
        resolve_request([1], SamplingParams(bad_words=["ab"]), limits())
