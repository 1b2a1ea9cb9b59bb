"""Byte-level BPE tokenizers of GGUF files, on the `tokenizers` library alone.

A GGUF file spells its vocabulary, its merges and the kind of each token out, and names how text is
split before merges apply (`tokenizer.ggml.pre`). The splits are those that the models' own
tokenizer.json files have.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

__all__ = ["byte_level_tokenizer"]

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _WORDS.format(numbers=r"\p{N}{1,3}"), _WORDS.format(numbers=r"\p{N}")
_SPLITS = {
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
}  # fmt: skip
_GPT2 = ("gpt-2", "gpt2")
_DIGITS = ("smollm",)  # each digit a piece of its own, then as GPT-2

_CONTROL, _USER_DEFINED = 3, 4
_BYTES = frozenset(ByteLevel.alphabet())


def byte_level_tokenizer(entries: Mapping[str, Any], ends: Mapping[str, Any]) -> Tokenizer | None:
    """None: a tokenizer of another kind, or split in a way that is not known here.

    entries  "tokenizer_type", "pre_tokenizer_type", "tokens", "merges", "token_type"
    ends     "bos", "eos": the id that is put before or after a text; None: none
    """
    pre = str(entries.get("pre_tokenizer_type"))
    known = pre in _SPLITS or pre in _GPT2 or pre in _DIGITS
    if entries.get("tokenizer_type") != "gpt2" or not known:
        return None
    tokens = entries["tokens"]
    with _no_collection():
        merges = [tuple(merge.split(" ", 1)) for merge in entries["merges"]]
        vocab = {token: token_id for token_id, token in enumerate(tokens)}
        made = Tokenizer(BPE(vocab, merges, ignore_merges=_SPLITS.get(pre) == _LLAMA3))
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        bytes_only = ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    else:
        words = ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in _DIGITS else []
        made.pre_tokenizer = pre_tokenizers.Sequence([*digits, words])
    if _SPLITS.get(pre) == _QWEN2:
        made.normalizer = normalizers.NFC()
    made.decoder = ByteLevelDecoder()
    kinds = entries.get("token_type") or [1] * len(tokens)
    # Every token of such a vocabulary is spelled in the alphabet of bytes: a control token that is
    # not was marked by mistake, and would get a new id.
    of_kind: dict[int, list[AddedToken]] = {_CONTROL: [], _USER_DEFINED: []}
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in of_kind and (kind != _CONTROL or _BYTES.issuperset(token)):
            of_kind[kind].append(AddedToken(token, normalized=False, special=kind == _CONTROL))
    made.add_special_tokens(of_kind[_CONTROL])
    made.add_tokens(of_kind[_USER_DEFINED])
    front, behind = ends.get("bos"), ends.get("eos")
    around = [(tokens[token_id], token_id) for token_id in (front, behind) if token_id is not None]
    if around:
        first = "" if front is None else f"{tokens[front]}:0 "
        last = "" if behind is None else f" {tokens[behind]}:0"
        made.post_processor = processors.TemplateProcessing(
            single=f"{first}$A:0{last}", pair=f"{first}$A:0{last} {first}$B:1{last}",
            special_tokens=around,
        )  # fmt: skip
    return made


@contextmanager
def _no_collection() -> Iterator[None]:
    """Fifty thousand pairs, none of them in a cycle, make the collector of cycles look through all
    objects again and again: a third of the time that a tokenizer takes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
