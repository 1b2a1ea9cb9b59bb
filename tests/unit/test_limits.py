"""Sizes are refused before anything is copied, counted or tokenised: by calls and by allocation."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from specdec_ext import SamplingParams
from specdec_ext.config.engine import SchedulerConfig
from specdec_ext.errors import CapacityError, ConfigError, RequestError
from specdec_ext.request.resolve import EngineLimits, resolve_request
from specdec_ext.text.prompts import PromptReader

MAX_SEQ_LEN = 1000


class Words:
    """A tokenizer that counts its calls: one token per word, of at most 20 characters."""

    special_tokens_map: Mapping[str, str] = {}
    chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        self.calls += 1
        return {"input_ids": [len(word) for word in text.split()]}

    def get_vocab(self) -> dict[str, int]:
        return {"x" * n: n for n in range(1, 21)}

    def get_chat_template(self) -> str:
        return self.chat_template


def peak_of(call: Callable[[], object]) -> int:
    """Bytes that Python allocates at most while a call is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def limits(**changed: Any) -> EngineLimits:
    given: dict[str, Any] = {
        "vocab_size": 100, "max_seq_len": MAX_SEQ_LEN, "eos_token_ids": (),
        "speculative_config": None, "num_pages": 1000, "tokens_per_block": 8, **changed,
    }  # fmt: skip
    return EngineLimits(**given)


@pytest.mark.parametrize("kind", ["list", "tuple", "array", "mapping", "of several"])
def test_long_prompts_are_refused_uncopied(kind: str) -> None:
    ids: Any = [1] * 3_000_000
    if kind == "tuple":
        ids = tuple(ids)
    elif kind == "array":
        ids = np.ones(3_000_000, np.int64)
    elif kind == "mapping":
        ids = {"prompt_token_ids": ids}
    elif kind == "of several":
        ids = [[1, 2], ids]
    reader = PromptReader(Words(), MAX_SEQ_LEN)
    with pytest.raises(CapacityError, match="prompt has 3000000 tokens, max_seq_len = 1000 leaves"):
        reader.read_all(ids)
    assert peak_of(lambda: reader.read_all(ids)) < 100_000
    if kind in ("list", "tuple"):
        assert peak_of(lambda: resolve_request(ids, SamplingParams(), limits())) < 100_000


def test_long_texts_are_refused_before_they_are_tokenised() -> None:
    tokenizer = Words()
    reader = PromptReader(tokenizer, MAX_SEQ_LEN)
    text = "word " * 1_000_000
    message = "prompt has 5000000 characters, limit 20000: max_seq_len = 1000 tokens cannot be more"
    with pytest.raises(CapacityError, match=message):
        reader.read(text)
    assert peak_of(lambda: reader.read(text)) < 100_000
    with pytest.raises(RequestError, match="messages hold 5000000 characters, limit 20000"):
        reader.read_chat([{"role": "user", "content": text}])
    assert tokenizer.calls == 0
    # What can fit is tokenised, and judged by its tokens.
    assert len(reader.read("x" * 20_000)[1]) == 1 and tokenizer.calls == 1
    assert reader.read_chat([{"role": "user", "content": "a b"}]) == ("a b ", [1, 1])


@pytest.mark.parametrize("position", [None, MAX_SEQ_LEN, 2 * MAX_SEQ_LEN])
def test_limits_of_the_model_itself_cannot_be_raised(position: int | None) -> None:
    reader = PromptReader(Words(), MAX_SEQ_LEN, position)
    ids, engine = [1] * MAX_SEQ_LEN, limits(max_position=position)
    expected = SamplingParams(prediction=[1] * (MAX_SEQ_LEN + 1))
    for call in (
        lambda: reader.read(ids),
        lambda: reader.read(np.array(ids)),
        lambda: reader.read("word " * 100_000),
        lambda: resolve_request(ids, SamplingParams(), engine),
        lambda: resolve_request([1], expected, engine),
    ):
        with pytest.raises(CapacityError) as refused:
            call()
        end = "or raise SchedulerConfig.max_seq_len or KvCacheConfig.max_tokens"
        if position == MAX_SEQ_LEN:
            end = "the model itself has no more positions"
        assert str(refused.value).endswith(end)


@pytest.mark.parametrize("field", ["allowed_token_ids", "stop_token_ids"])
def test_an_endless_list_ends(field: str) -> None:
    with pytest.raises(RequestError, match=rf"SamplingParams\.{field} has more than \d+ entries"):
        SamplingParams(**{field: itertools.count()})


class Uncounted(Mapping[int, float]):
    """A dict whose entries nobody may look at."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: int) -> float:
        raise AssertionError("read")

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("iterated")


def test_many_biases_are_refused_unread() -> None:
    with pytest.raises(RequestError, match="logit_bias has 65537 entries, limit 65536"):
        SamplingParams(logit_bias=Uncounted(65537))
    SamplingParams(logit_bias=dict.fromkeys(range(65536), 1.0))


def test_bad_words_are_bounded_in_all() -> None:
    with pytest.raises(RequestError, match="bad_words have 132000 characters, limit 131072"):
        SamplingParams(bad_words=["x" * 1000] * 132)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"cache_salt": "a\ud800"}, "SamplingParams.cache_salt"),
        ({"stop": ["a\udfff"]}, "SamplingParams.stop"),
        ({"bad_words": ["a\ud800"]}, "SamplingParams.bad_words"),
    ],
)
def test_half_a_surrogate_pair_is_no_text(given: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=rf"{field}.* holds half a surrogate pair \(U\+D"):
        SamplingParams(**given)


def test_half_a_surrogate_pair_is_no_prompt() -> None:
    reader = PromptReader(Words(), MAX_SEQ_LEN)
    for call in (
        lambda: reader.read("a\ud800b"),
        lambda: reader.read_chat([{"role": "user", "content": "a\ud800b"}]),
    ):
        with pytest.raises(RequestError, match=r"half a surrogate pair \(U\+D800\) at character 1"):
            call()
    assert reader.read("ä 😀")[1] == [1, 1]


@pytest.mark.parametrize("value", [0, -1, 2**20 + 1, True, 1.5, "8"])
def test_queue_length_of_a_configuration(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"SchedulerConfig\.max_queued_requests = "):
        SchedulerConfig(max_queued_requests=value)
