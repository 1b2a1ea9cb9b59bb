"""Checks of the lists in SamplingParams: token ids, bad words, biases, processors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..config.validate import check_float, check_int, check_str, show
from ..errors import RequestError

__all__ = ["check_bad_words", "check_ids", "check_logit_bias", "check_processors"]

MAX_TOKEN_ID = 2**31 - 1
MAX_ID_LIST = 2**20  # allowed_token_ids may name a whole vocabulary, no more than that
MAX_BAD_WORDS = 4096
MAX_BAD_WORD_TOKENS = 64
MAX_BAD_WORD_CHARS = 2**17  # of all words: each is tokenised, with and without a space
MAX_LOGIT_BIAS = 2**16
MAX_STOP_CHARS = 1024
MAX_PROCESSORS = 64


def check_ids(name: str, value: object, *, max_count: int) -> list[int]:
    """A list of token ids >= 0; the vocabulary is not known here."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise RequestError(
            f"SamplingParams.{name} = {show(value)}: expected a list of token ids, "
            f"got {type(value).__name__}; pass for example [1, 2]"
        )
    items = list(itertools.islice(value, max_count + 1))  # it may be endless
    if len(items) > max_count:
        raise RequestError(
            f"SamplingParams.{name} has more than {max_count} entries, the limit; shorten it"
        )
    # One pass in C for the usual list of plain ints; the slow path words the refusal.
    if all(type(t) is int for t in items) and (
        not items or 0 <= min(items) <= max(items) <= MAX_TOKEN_ID
    ):
        return items
    return [
        check_int(f"SamplingParams.{name}[{i}]", item, RequestError, low=0, high=MAX_TOKEN_ID,
                  remedy="token ids are integers >= 0")
        for i, item in enumerate(items)
    ]  # fmt: skip


def check_bad_words(raw: object) -> tuple[str | tuple[int, ...], ...]:
    """SamplingParams.bad_words as strings and id sequences."""
    if raw is None:
        return ()
    if isinstance(raw, (str, bytes, Mapping)) or not isinstance(raw, Sequence):
        raise RequestError(
            f"SamplingParams.bad_words = {show(raw)}: expected a list of strings or of token "
            "id lists; put a single word into a list"
        )
    if len(raw) > MAX_BAD_WORDS:
        raise RequestError(
            f"SamplingParams.bad_words has {len(raw)} entries, limit {MAX_BAD_WORDS}; shorten it"
        )
    length = sum(len(word) for word in raw if isinstance(word, str))
    if length > MAX_BAD_WORD_CHARS:
        raise RequestError(
            f"SamplingParams.bad_words have {length} characters, limit {MAX_BAD_WORD_CHARS}; "
            "shorten them, or give token ids"
        )
    words: list[str | tuple[int, ...]] = []
    for i, word in enumerate(raw):
        name = f"bad_words[{i}]"
        if isinstance(word, str):
            checked: str | tuple[int, ...] = check_str(
                f"SamplingParams.{name}", word, RequestError, max_len=MAX_STOP_CHARS
            )
        else:
            checked = tuple(check_ids(name, word, max_count=MAX_BAD_WORD_TOKENS))
        if not checked:
            raise RequestError(f"SamplingParams.{name} is empty; remove it")
        words.append(checked)
    return tuple(words)


def check_logit_bias(raw: object) -> dict[int, float]:
    """SamplingParams.logit_bias with integer keys."""
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise RequestError(
            f"SamplingParams.logit_bias = {show(raw)}: expected a dict of token id to bias; "
            "pass for example {42: -100.0}"
        )
    if len(raw) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"SamplingParams.logit_bias has {len(raw)} entries, limit {MAX_LOGIT_BIAS}; to allow "
            "or forbid many tokens use allowed_token_ids"
        )
    bias: dict[int, float] = {}
    for key, value in raw.items():
        # JSON has only string keys, so "42" is the id 42.
        is_id = isinstance(key, str) and key.isdecimal() and len(key) <= 18
        token: object = int(key) if is_id else key
        token_id = check_int(
            "SamplingParams.logit_bias key", token, RequestError, low=0, high=MAX_TOKEN_ID
        )
        bias[token_id] = check_float(
            f"SamplingParams.logit_bias[{token_id}]", value, RequestError,
            low=-100.0, high=100.0, remedy="to forbid a token use bad_words",
        )  # fmt: skip
    return bias


def check_processors(raw: object) -> tuple[Any, ...]:
    """SamplingParams.logits_processors as a tuple of callables."""
    if raw is None:
        return ()
    if not isinstance(raw, (list, tuple)):
        raise RequestError(
            f"SamplingParams.logits_processors = {show(raw)}: expected a list of callables "
            f"(token_ids, scores) -> scores, got {type(raw).__name__}; put a single one into a list"
        )
    if len(raw) > MAX_PROCESSORS:
        raise RequestError(
            f"SamplingParams.logits_processors has {len(raw)} entries, limit {MAX_PROCESSORS}; "
            "shorten it"
        )
    for i, processor in enumerate(raw):
        if not callable(processor):
            raise RequestError(
                f"SamplingParams.logits_processors[{i}] = {show(processor)}: expected a callable "
                f"(token_ids, scores) -> scores, got {type(processor).__name__}"
            )
    return tuple(raw)
