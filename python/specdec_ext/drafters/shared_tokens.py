"""Tokens that two vocabularies share: a draft model with another tokenizer drafts them.

TLI, token-level intersection: a token's text is its bytes, whatever its tokenizer writes for a
space or for a byte; the tokens whose bytes both vocabularies have may be drafted, and a draft
model's scores of all others are left out before its softmax. What is drafted is then known as the
target's token, with the probability that it was drawn with, so acceptance needs no change.

Source: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies" (2025), section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..config.draft_target import MIN_VOCAB_OVERLAP
from ..errors import ConfigError
from ..text.detokenizer import DetokenizerFactory

__all__ = ["SharedTokens", "Vocabulary", "find_shared_tokens", "stand_in"]

# How tokenizers that are of no known kind may write a space.
_SPACES = ("\u0120", "\u2581")


class Vocabulary(Protocol):
    """What is asked of a model: a ModelConfig, or a StepModel's info."""

    @property
    def path(self) -> Path: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def pad_token_id(self) -> int | None: ...


@dataclass(frozen=True)
class SharedTokens:
    """target_ids  int64 [n] ascending
    draft_ids   int64 [n] the draft model's ids of the same tokens
    input_ids   int64 [V of the target] what the draft model reads for an id
    overlap     share of the smaller vocabulary that the other one has, too
    """

    target_ids: np.ndarray
    draft_ids: np.ndarray
    input_ids: np.ndarray
    overlap: float


def find_shared_tokens(
    target: Vocabulary, draft: Vocabulary, target_tokenizer: Any, draft_tokenizer: Any
) -> SharedTokens | None:
    """None: the same words have the same ids, and nothing has to be mapped.

    The draft model reads a token that it does not have as the longest of its own tokens that the
    text ends with: one row for one token, so that both models' pages stay those of one text.

    Raises ConfigError for too small an overlap, or without both tokenizers.
    """
    if target_tokenizer is None or draft_tokenizer is None:
        missing = target if target_tokenizer is None else draft
        raise ConfigError(
            f"allow_vocab_mapping: {str(missing.path)!r} has no tokenizer, and tokens are mapped "
            "by their text; put the tokenizer's files into the folder"
        )
    words, others = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if words == others:
        return None
    ours = _Texts(target_tokenizer, words, target.vocab_size)
    theirs = _Texts(draft_tokenizer, others, draft.vocab_size)
    shared = ours.id_of.keys() & theirs.id_of.keys()
    smaller = min(len(ours.id_of), len(theirs.id_of))
    overlap = len(shared) / smaller if smaller else 0.0
    if overlap < MIN_VOCAB_OVERLAP:
        raise ConfigError(
            f"draft model {str(draft.path)!r}: its vocabulary and the target's share "
            f"{len(shared)} tokens: {overlap:.3f} of the smaller one (target {len(ours.id_of)}, "
            f"draft {len(theirs.id_of)}), at least {MIN_VOCAB_OVERLAP} is needed to draft; use a "
            "draft model whose tokenizer is nearer to the target's, or suffix decoding"
        )
    pairs = {ours.id_of[text]: theirs.id_of[text] for text in shared}
    pairs |= {ours.special[w]: theirs.special[w] for w in ours.special.keys() & theirs.special}
    for mine, other in _same_roles(target, draft):
        if mine not in pairs and other not in pairs.values():
            pairs[mine] = other
    target_ids = np.array(sorted(pairs), dtype=np.int64)
    return SharedTokens(
        target_ids=target_ids,
        draft_ids=np.array([pairs[token] for token in target_ids.tolist()], dtype=np.int64),
        input_ids=_input_ids(target, draft, ours, theirs, pairs),
        overlap=overlap,
    )


def stand_in(draft: Vocabulary) -> int:
    """What the draft model reads for an id that says nothing to it."""
    for token in (draft.pad_token_id, *draft.eos_token_ids, draft.bos_token_id):
        if token is not None and 0 <= token < draft.vocab_size:
            return int(token)
    return 0


class _Texts:
    """What the tokens of a vocabulary stand for.

    text_of  id -> bytes, of tokens that are text
    id_of    the reverse; where several tokens have a text, the one that a tokenizer would choose: a
             token of a byte (<0x41>) stands after one of its text
    special  word -> id of special tokens, which are no text
    """

    def __init__(self, tokenizer: Any, words: Mapping[str, int], vocab_size: int) -> None:
        special = _special_ids(tokenizer)
        factory = DetokenizerFactory(tokenizer)
        self.text_of: dict[int, bytes] = {}
        self.id_of: dict[bytes, int] = {}
        self.special: dict[str, int] = {}
        of_bytes: list[int] = []
        for word, token in sorted(words.items(), key=itemgetter(1)):
            if not 0 <= token < vocab_size:
                continue
            if token in special:
                self.special[word] = token
                continue
            text = factory.token_bytes(token)
            if text is None:
                text = _with_spaces(word).encode(errors="surrogatepass")
            if not text:
                continue
            self.text_of[token] = text
            if len(text) == 1 and len(word) == len("<0x00>") and word.startswith("<0x"):
                of_bytes.append(token)
            else:
                self.id_of.setdefault(text, token)
        for token in of_bytes:
            self.id_of.setdefault(self.text_of[token], token)


def _with_spaces(word: str) -> str:
    for mark in _SPACES:
        word = word.replace(mark, " ")
    return word


def _special_ids(tokenizer: Any) -> frozenset[int]:
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "get_added_tokens_decoder"):
        added = backend.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)
    return frozenset(getattr(tokenizer, "all_special_ids", ()))


def _same_roles(target: Vocabulary, draft: Vocabulary) -> Iterator[tuple[int, int]]:
    """Tokens that begin and end a text, whatever they are called."""
    if target.bos_token_id is not None and draft.bos_token_id is not None:
        yield target.bos_token_id, draft.bos_token_id
    yield from zip(target.eos_token_ids, draft.eos_token_ids, strict=False)


def _input_ids(
    target: Vocabulary, draft: Vocabulary, ours: _Texts, theirs: _Texts, pairs: dict[int, int]
) -> np.ndarray:
    unknown = stand_in(draft)
    result = np.full(target.vocab_size, unknown, dtype=np.int64)
    ends = [token for token in draft.eos_token_ids if 0 <= token < draft.vocab_size]
    for token in target.eos_token_ids:
        if ends and 0 <= token < target.vocab_size:
            result[token] = ends[0]
    for token, text in ours.text_of.items():
        endings = (theirs.id_of.get(text[begin:]) for begin in range(len(text)))
        result[token] = next((found for found in endings if found is not None), unknown)
    for token, other in pairs.items():
        result[token] = other
    return result
