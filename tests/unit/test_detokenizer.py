"""Incremental decoding: the stream is the full decode, in whole characters, in linear time."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec_ext.text.detokenizer import REPLACEMENT, DetokenizerFactory

TEXTS = [
    "hello world",
    " indented\n\n\tcode()",
    "naïve café",
    "日本語テキスト",
    "🙂👩‍👩‍👧‍👦 emoji",
    "한국어 글자",
]


def byte_level() -> Any:
    """All 256 bytes, some merges, a special token and an ordinary added one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w"), ("ã", "ģ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    core = Tokenizer(models.BPE(vocab, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    core.add_tokens(["<plain é>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


def byte_fallback() -> Any:
    """SentencePiece style: words with U+2581, bytes as <0xNN>, one leading space stripped."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)}
    for piece in ("\u2581", "\u2581hello", "\u2581world", "h", "e", "llo", "é", "\n", "</s>"):
        vocab[piece] = len(vocab)
    core = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def word_piece() -> Any:
    """A decoder of neither kind: joins ## pieces, puts spaces between words."""
    vocab = {w: i for i, w in enumerate(["[UNK]", "hello", "##wor", "##ld", "été", "x", "[SEP]"])}
    core = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece(cleanup=False)
    core.add_special_tokens(["[SEP]"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="[SEP]")


MAKERS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "word_piece": word_piece}
TOKENIZERS = {name: make() for name, make in MAKERS.items()}


def stream(factory: DetokenizerFactory, ids: list[int], skip: bool) -> list[str]:
    decoder = factory.make(skip)
    return [decoder.push(i) for i in ids] + [decoder.finish()]


def full(tokenizer: Any, ids: list[int], skip: bool) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    return text


def test_kinds_are_recognised() -> None:
    """Which tokens decode one by one; the others need a window of text."""
    kinds = {
        name: type(DetokenizerFactory(TOKENIZERS[name]).make()).__name__
        for name in ("byte_level", "byte_fallback", "word_piece")
    }
    assert kinds == {
        "byte_level": "_BytesDetokenizer",
        "byte_fallback": "_BytesDetokenizer",
        "word_piece": "_WindowDetokenizer",
    }


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
@pytest.mark.parametrize("name", ["byte_level", "word_piece"])
def test_random_ids_stream_to_the_full_decode(name: str, data: st.DataObject, skip: bool) -> None:
    # Byte-level ids at random are mostly broken UTF-8: U+FFFD must come out as decode() has it.
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), max_size=40))
    if name == "word_piece":
        ids = [i for i in ids if i < len(tokenizer)]
    pieces = stream(DetokenizerFactory(tokenizer), ids, skip)
    assert "".join(pieces) == full(tokenizer, ids, skip)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("force_window", [False, True])
def test_no_piece_ends_inside_a_character(text: str, force_window: bool) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    factory = DetokenizerFactory(tokenizer)
    if force_window:
        factory._table = None
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(factory, ids, True)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_fallback_of_valid_text(text: str) -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    words = {"hello": 257, "world": 258}
    ids: list[int] = []
    for i, word in enumerate(text.split(" ")):
        if word in words:
            ids.append(words[word])
        else:
            ids += [256] if i else []
            ids += list(word.encode())
    pieces = stream(DetokenizerFactory(tokenizer), ids, True)
    assert "".join(pieces) == full(tokenizer, ids, True)
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_special_tokens() -> None:
    for tokenizer in TOKENIZERS.values():
        eos = tokenizer.eos_token_id
        factory = DetokenizerFactory(tokenizer)
        for ids in ([eos], [eos, 1, eos, eos, 2], [1, eos]):
            for skip in (True, False):
                assert "".join(stream(factory, ids, skip)) == full(tokenizer, ids, skip)


def test_an_unfinished_character_is_held_then_flushed() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("日", add_special_tokens=False)
    assert len(ids) == 3
    decoder = DetokenizerFactory(tokenizer).make()
    assert [decoder.push(i) for i in ids[:2]] == ["", ""]
    assert decoder.finish() == full(tokenizer, ids[:2], True) == REPLACEMENT


@pytest.mark.parametrize("force_window", [False, True])
def test_cost_is_linear_even_for_broken_text(force_window: bool) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    factory = DetokenizerFactory(tokenizer)
    if force_window:
        factory._table = None
    byte = tokenizer.convert_tokens_to_ids("Ģ")  # a lone continuation byte: never valid
    special = tokenizer.eos_token_id

    def seconds(token: int, count: int) -> float:
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            stream(factory, [token] * count, True)
            best = min(best, time.process_time() - start)
        return best

    for token in (byte, special):
        seconds(token, 50)
        # 16 times the tokens: linear is 16, quadratic 256.
        assert seconds(token, 8000) < 80 * seconds(token, 500)


@pytest.mark.default_model
def test_default_models_tokenizer(default_model_path: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(default_model_path), local_files_only=True)
    factory = DetokenizerFactory(tokenizer)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert "".join(stream(factory, ids, True)) == full(tokenizer, ids, True) == text


def test_special_tokens_have_their_texts() -> None:
    """From the tokenizer's file, or from a tokenizer in Python that has none."""

    class Slow:
        all_special_ids = (3, 4)

        def decode(self, ids: list[int], **_: Any) -> str:
            return f"<{ids[0]}>"

    known = TOKENIZERS["byte_level"]
    end = known.convert_tokens_to_ids("<|end|>")
    assert DetokenizerFactory(known).special_tokens == {end: "<|end|>"}
    assert DetokenizerFactory(Slow()).special_tokens == {3: "<3>", 4: "<4>"}
