"""Tokenizers of GGUF files: without transformers where they are byte-level BPE, the same tokens."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from specdec_ext.errors import ModelError
from specdec_ext.gguf.reader import GgufFile
from specdec_ext.text import gguf_tokenizer as module
from specdec_ext.text.file_tokenizer import FileTokenizer
from specdec_ext.text.tokenizer import load_tokenizer

SPECIAL = ["<|start|>", "<|end|>"]
OWN = "<think>"
ALPHABET = "aAbBzZ 0123456789  \n\r\t.,!'sré日本語🎉ﬁÅ\u0301_-/\\"
WORDS = [
    "the cat's",
    "DON'T",
    "we'll",
    "12345",
    "  77",
    "x = 3;\n\n",
    "<think>",
    "<|end|>",
    "naïve",
]


def texts(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        parts = [draw.choice(WORDS) if draw.random() < 0.3 else draw.choice(ALPHABET)
                 for _ in range(draw.randrange(40))]  # fmt: skip
        made.append("".join(parts))
    return made


def write(path: Path, pre: str, **entries: Any) -> Path:
    """A file with a tokenizer alone, trained on random texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    core.train_from_iterator([text.replace(OWN, "") for text in texts(1, 400)], trainer)
    vocab = sorted(core.get_vocab().items(), key=lambda entry: entry[1])
    tokens = [*(token for token, _ in vocab), OWN, "not  bytes"]
    merges = json.loads(core.to_str())["model"]["merges"]
    kinds = dict.fromkeys([*SPECIAL, "not  bytes"], 3) | {OWN: 4}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, 1) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(entries.get("eos", 1))
    writer.add_add_bos_token(entries.get("add_bos", False))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocab_of(path: Path) -> list[str]:
    with GgufFile(path) as file:
        tokens: list[str] = file.get("tokenizer.ggml.tokens")
        return tokens


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_tokens_are_those_of_transformers(
    pre: str, add_bos: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "t.gguf", pre, add_bos=add_bos)
    ours = load_tokenizer(None, path)
    monkeypatch.setattr(module, "_byte_level", lambda *_: None)
    theirs = load_tokenizer(None, path)
    assert isinstance(ours, FileTokenizer) and not isinstance(theirs, FileTokenizer)
    for text in texts(2, 500):
        ids = ours.encode(text)
        # Qwen's own tokenizer.json composes characters; transformers' converter forgets to.
        composed = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert ids == theirs.encode(composed), text
        assert ours.decode(ids) == theirs.decode(ids)
        assert ids[:1] == [0] if add_bos else ids == ours.encode(text, add_special_tokens=False)
    assert ours.eos_token_id == theirs.eos_token_id == 1
    assert len(ours) == len(vocab_of(path))  # transformers adds an end token of its own


def test_digits_are_pieces_of_their_own(tmp_path: Path) -> None:
    """SmolLM's vocabulary was made so: a run of spaces in front of a number stays whole."""
    ours = load_tokenizer(None, write(tmp_path / "t.gguf", "smollm"))
    core = ours.backend_tokenizer
    assert [piece for piece, _ in core.pre_tokenizer.pre_tokenize_str("a   12b")] == [
        "a", "ĠĠĠ", "1", "2", "b",
    ]  # fmt: skip
    for text in texts(3, 200):
        pieces, at = [], 0
        for end in range(1, len(text) + 1):  # by hand: what lies between digits
            if end == len(text) or text[end].isdigit() or text[end - 1].isdigit():
                pieces.append(text[at:end])
                at = end
        if OWN in text or any(token in text for token in SPECIAL):
            continue
        plain = load_plain(core)
        assert ours.encode(text) == [i for piece in pieces for i in plain.encode(piece).ids], text


def load_plain(core: Tokenizer) -> Tokenizer:
    plain = Tokenizer.from_str(core.to_str())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return plain


def test_damaged_entries_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.gguf", "qwen2", eos=70_000)
    with pytest.raises(ModelError, match=r"t\.gguf: eos_token_id = 70000"):
        load_tokenizer(None, path)
