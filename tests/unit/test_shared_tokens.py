"""Which tokens two vocabularies share, against a reference that knows what the tokens are."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from reference.vocab_mapping_reference import (
    Ends,
    Tok,
    draft_law,
    output_law,
    overlap,
    pairs,
    reads,
)
from specdec_ext import ConfigError
from specdec_ext.drafters.shared_tokens import find_shared_tokens

# GPT-2's spelling of bytes, as its paper's code has it.
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE = {b: chr(b) for b in _PLAIN} | {
    b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in _PLAIN)
}


@dataclass
class Side:
    """A vocabulary with its tokenizer, and what a model's configuration says of it."""

    tokens: list[Tok]
    tokenizer: Any
    ends: Ends = field(default_factory=Ends)
    path: Path = Path("some/model")

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def bos_token_id(self) -> int | None:
        return self.ends.bos

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.ends.eos

    @property
    def pad_token_id(self) -> int | None:
        return self.ends.pad


def wrapped(core: Tokenizer, specials: dict[str, int]) -> Any:
    core.add_special_tokens([AddedToken(name, special=True) for name in specials])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def byte_level(texts: list[bytes], specials: dict[str, int] | None = None) -> Any:
    """Words spelled in GPT-2's alphabet, in the order of their ids."""
    vocab = {"".join(BYTE[b] for b in text): i for i, text in enumerate(texts)}
    vocab |= specials or {}
    core = Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return wrapped(core, specials or {})


def sentencepiece(words: list[str], specials: dict[str, int] | None = None) -> Any:
    """Words with a mark for a space, and tokens of bytes."""
    vocab = {word: i for i, word in enumerate(words)} | (specials or {})
    core = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return wrapped(core, specials or {})


def check(target: Side, draft: Side) -> Any:
    """The mapping is the reference's."""
    shared = find_shared_tokens(target, draft, target.tokenizer, draft.tokenizer)
    assert shared is not None
    wanted = pairs(target.tokens, draft.tokens, target.ends, draft.ends)
    assert dict(
        zip(shared.target_ids.tolist(), shared.draft_ids.tolist(), strict=True)
    ) == wanted  # fmt: skip
    assert shared.target_ids.tolist() == sorted(wanted)
    assert len(set(shared.draft_ids.tolist())) == len(shared.draft_ids)
    args = (target.tokens, draft.tokens, target.ends, draft.ends)
    assert shared.input_ids.tolist() == [reads(*args, t) for t in range(target.vocab_size)]
    assert shared.overlap == overlap(target.tokens, draft.tokens)
    return shared


def random_texts(draw: random.Random, count: int) -> list[bytes]:
    """All single letters, then words of them with spaces and a letter of two bytes."""
    letters = [bytes([b]) for b in b"abc xyz"] + [b"\xc3", b"\xa9"]
    made = dict.fromkeys(letters)
    while len(made) < count:
        word = "".join(draw.choices(["a", "b", " ", "é"], k=draw.randint(2, 3)))
        made[word.encode()] = None
    texts = list(made)
    draw.shuffle(texts)
    return texts


@pytest.mark.parametrize("seed", range(4))
def test_two_byte_level_vocabularies(seed: int) -> None:
    draw = random.Random(seed)
    sides = []
    for count in (80, 60):
        texts = random_texts(draw, count)
        names = {"<|end|>": count, f"<|{count}|>": count + 1}
        tokens = [Tok(text) for text in texts] + [Tok(special=name) for name in names]
        sides.append(
            Side(tokens, byte_level(texts, names), Ends(eos=(count + draw.randint(0, 1),)))
        )
    check(sides[0], sides[1])
    check(sides[1], sides[0])


def test_bytes_and_marks_of_spaces_are_the_same_text() -> None:
    """Llama 2's spelling against GPT-2's: spaces, letters beyond ASCII, and tokens of bytes."""
    words = ["<0x41>", "<0x0A>", "<0xC3>", "▁", "▁the", "the", "A", "é", "Ġ", "▁né", "x"]
    texts = [b"A", b"\n", b"\xc3", b" ", b" the", b"the", b"A", "é".encode(), "Ġ".encode()]
    texts += [" né".encode(), b"x"]
    spelled = [Tok(t, is_byte=i < 3) for i, t in enumerate(texts)]
    specials = {"<s>": 11, "</s>": 12}
    llama = Side(
        [*spelled, Tok(special="<s>"), Tok(special="</s>")],
        sentencepiece(words, specials),
        Ends(11, (12,)),
    )
    order = [b" the", b"A", b"\n", b"x", "é".encode(), b" ", b"\xc3", b"the", "Ġ".encode(), b"zz"]
    gpt = Side(
        [*map(Tok, order), Tok(special="<|endoftext|>")],
        byte_level(order, {"<|endoftext|>": 10}),
        Ends(10, (10,), 10),
    )
    shared = check(llama, gpt)
    at = dict(zip(shared.target_ids.tolist(), shared.draft_ids.tolist(), strict=True))
    assert at[6] == 1 and 0 not in at  # "A" is what is drafted, <0x41> only read
    assert shared.input_ids[0] == 1 and at[1] == 2
    assert at[8] == 8 and at[4] == 0  # a letter that looks like the mark of a space is a letter
    assert shared.input_ids[9] == 4  # " né" ends with "é"
    assert at[11] == 10 and 12 not in at and shared.input_ids[12] == 10  # begin, then end
    check(gpt, llama)


def test_padding_and_unknown_text_are_read_as_something() -> None:
    texts = [b"a", b"b", b"c", b"qq"]
    target = Side([*map(Tok, texts), Tok(), Tok()], byte_level(texts))
    draft = Side([Tok(b"c"), Tok(b"b"), Tok(b"a"), Tok()], byte_level([b"c", b"b", b"a"]))
    assert check(target, draft).input_ids.tolist() == [2, 1, 0, 0, 0, 0]
    draft.ends = Ends(pad=3)
    assert check(target, draft).input_ids.tolist() == [2, 1, 0, 3, 3, 3]


def test_a_word_of_a_special_token_is_not_text() -> None:
    """What looks the same is not: one ends a text, the other writes it down."""
    target = Side([Tok(b"a"), Tok(b"b"), Tok(b"<e>")], byte_level([b"a", b"b", b"<e>"]))
    specials = {"<e>": 2}
    draft = Side(
        [Tok(b"b"), Tok(b"a"), Tok(special="<e>")],
        byte_level([b"b", b"a"], specials),
        Ends(eos=(2,)),
    )
    shared = check(target, draft)
    assert shared.target_ids.tolist() == [0, 1]


def test_equal_vocabularies_need_no_mapping() -> None:
    texts = [b"a", b"b"]
    one, other = (Side([*map(Tok, texts)], byte_level(texts)) for _ in range(2))
    assert find_shared_tokens(one, other, one.tokenizer, other.tokenizer) is None


def test_ids_beyond_the_model_are_nobodys() -> None:
    texts = [b"a", b"b", b"c"]
    target = Side([Tok(b"a"), Tok(b"b")], byte_level(texts))  # its model scores two
    draft = Side([Tok(b"c"), Tok(b"b"), Tok(b"a")], byte_level([b"c", b"b", b"a"]))
    assert check(target, draft).target_ids.tolist() == [0, 1]


def test_too_small_an_overlap_is_refused() -> None:
    target = Side(
        [Tok(bytes([b])) for b in b"abcdefgh"], byte_level([bytes([b]) for b in b"abcdefgh"])
    )
    texts = [bytes([b]) for b in b"abuvwxyz"]
    draft = Side([*map(Tok, texts)], byte_level(texts), path=Path("small"))
    wanted = r"'small': .*share 2 tokens: 0\.250 of the smaller .*target 8, draft 8.*at least 0\.5"
    with pytest.raises(ConfigError, match=wanted + r".*suffix decoding"):
        find_shared_tokens(target, draft, target.tokenizer, draft.tokenizer)
    for tokenizers in ((None, draft.tokenizer), (target.tokenizer, None)):
        with pytest.raises(ConfigError, match=r"has no tokenizer.*put the tokenizer's files"):
            find_shared_tokens(target, draft, *tokenizers)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_law_is_the_targets_only_if_the_sampler_is_told_the_masked_law(
    temperature: float,
) -> None:
    """The reference itself: exact, no draws."""
    rng = np.random.default_rng(3)
    p = rng.dirichlet(np.ones(6))
    scores, paired = rng.normal(0, 2, 8), {0: 5, 2: 1, 3: 7, 5: 0}
    q = draft_law(scores, paired, len(p), temperature)
    assert np.isclose(q.sum(), 1.0) and q[[1, 4]].sum() == 0
    assert np.allclose(output_law(p, q, q), p, atol=1e-15)
    whole = np.exp(scores / temperature) / np.exp(scores / temperature).sum()
    unmasked = np.array([whole[paired[t]] if t in paired else 0.0 for t in range(len(p))])
    assert np.abs(output_law(p, q, unmasked) - p).max() > 1e-3
    shuffled = np.zeros(len(p))
    shuffled[list(paired)] = q[list(reversed(paired))]
    assert np.abs(output_law(p, q, shuffled) - p).max() > 1e-3
