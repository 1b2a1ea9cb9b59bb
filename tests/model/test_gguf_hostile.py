"""GGUF files that somebody made to break their reader: one ModelError that names file and field."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_files import write_gguf
from specdec_ext.errors import ModelError, UnsupportedModelError
from specdec_ext.gguf import GgufFile
from specdec_ext.models import load_model
from specdec_ext.text.tokenizer import load_tokenizer
from tiny_models import save_tiny

SECONDS = 2.0
TEXT, ARRAY, UINT32 = 8, 9, 4


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, extents: list[int], kind: int, offset: int) -> bytes:
    head = text(name) + struct.pack("<I", len(extents)) + struct.pack(f"<{len(extents)}Q", *extents)
    return head + struct.pack("<IQ", kind, offset)


def build(
    entries: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: int = 256,
) -> bytes:
    entries, tensors = entries or [], tensors or []
    counted = counts or (len(tensors), len(entries))
    head = magic + struct.pack("<IQQ", version, *counted) + b"".join(entries + tensors)
    return head + bytes(-len(head) % 32 + data)


HUGE = 2**63
F32, Q4_0 = 0, 2
# What is in the file, and what is said of it.
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "magic": (build(magic=b"GGML"), "begins with b'GGML'"),
    "short": (b"GGUF\3\0\0\0", "tensor_count: the file ends within it"),
    "entries": (build(counts=(0, HUGE)), "kv_count = 9223372036854775808: at most 65536"),
    "tensors": (build(counts=(2**17, 0)), "tensor_count = 131072: at most 65536"),
    "missing entries": (build(counts=(0, 900)), "metadata entry 0: a name of 0 bytes"),
    "key": (build([struct.pack("<Q", HUGE)]), "metadata entry 0: a text of 9223372036854775808"),
    "no utf-8": (build([entry(b"\xff", TEXT, text(b""))]), "metadata entry 0: a text that is not"),
    "twice": (build([entry(b"a", 7, b"\1")] * 2), "a: given twice"),
    "kind": (build([entry(b"a", 77, b"")]), "a: type 77 of a value is unknown"),
    "text": (build([entry(b"a", TEXT, struct.pack("<Q", 1 << 40))]), "a: a text of 1099511627776"),
    "array": (
        build([entry(b"a", ARRAY, struct.pack("<IQ", 6, 1 << 61))]),
        "a: an array of 2305843009213693952 elements",
    ),
    "texts": (
        build([entry(b"a", ARRAY, struct.pack("<IQ", TEXT, 2) + text(b"x") + b"\xff" * 8)]),
        "a: the file ends within it",
    ),
    "many texts": (
        build([entry(b"a", ARRAY, struct.pack("<IQ", TEXT, 2**22 + 1))], data=2**25 + 99),
        "4194305 texts in arrays, at most 4194304",
    ),
    "nested": (
        build([entry(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1))]),
        "a: an array of elements of type 9",
    ),
    "alignment": (
        build([entry(b"general.alignment", UINT32, struct.pack("<I", 48))]),
        "general.alignment = 48: expected a power of two",
    ),
    "alignment's type": (
        build([entry(b"general.alignment", TEXT, text(b"32"))]),
        "general.alignment is not a uint32",
    ),
    "dimensions": (build([], [tensor(b"t", [1] * 5, F32, 0)]), "'t': 5 dimensions"),
    "extent": (build([], [tensor(b"t", [HUGE], F32, 0)]), r"'t': extents \[9223372036854775808\]"),
    "zero extent": (build([], [tensor(b"t", [32, 0], F32, 0)]), r"'t': extents \[32, 0\]"),
    "product": (build([], [tensor(b"t", [2**32] * 4, F32, 0)]), "'t': .* bytes at 0: the file has"),
    "half a block": (build([], [tensor(b"t", [48], Q4_0, 0)]), "in whole blocks of 32"),
    "past the end": (build([], [tensor(b"t", [65], F32, 0)]), "'t': 260 bytes at 0: the file"),
    "far offset": (build([], [tensor(b"t", [1], F32, HUGE)]), "'t': 4 bytes at 92233720"),
    "offset": (build([], [tensor(b"t", [1], F32, 4)]), "'t': 4 bytes at 4: .* aligned to 32"),
    "overlap": (
        build([], [tensor(b"t", [16], F32, 0), tensor(b"u", [1], F32, 32)]),
        "'u': overlaps",
    ),
    "same name": (
        build([], [tensor(b"t", [1], F32, 0), tensor(b"t", [1], F32, 32)]),
        "'t': given twice",
    ),
}  # fmt: skip
UNSUPPORTED: dict[str, tuple[bytes, str]] = {
    "version": (build(version=1), "GGUF version 1: supported are 2 and 3"),
    "big endian": (build(version=0x03000000), "GGUF version 50331648: .* little-endian"),
    "type": (build([], [tensor(b"t", [256], 10, 0)]), "'t' is Q2_K: supported are .*Q4_K"),
    "unknown type": (build([], [tensor(b"t", [256], 999, 0)]), "'t' is of type 999"),
}


@pytest.mark.parametrize("name", [*BROKEN, *UNSUPPORTED])
def test_refused_in_words(name: str, tmp_path: Path) -> None:
    content, reason = {**BROKEN, **UNSUPPORTED}[name]
    kind: type[ModelError] = UnsupportedModelError if name in UNSUPPORTED else ModelError
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(kind, match=reason) as error:
        GgufFile(path)
    assert type(error.value) is kind and str(error.value).startswith(str(path))


def test_sound_parts_are_read(tmp_path: Path) -> None:
    """The same builder with nothing wrong: the cases above fail for their reasons."""
    path = tmp_path / "good.gguf"
    path.write_bytes(
        build(
            [
                entry(b"n", 11, struct.pack("<q", -5)),
                entry(b"t", TEXT, text("é".encode())),
                entry(b"l", ARRAY, struct.pack("<IQ", TEXT, 2) + text(b"x") + text(b"")),
                entry(b"f", ARRAY, struct.pack("<IQ2f", 6, 2, 0.5, -1.0)),
            ],
            [tensor(b"a", [4, 2], F32, 32), tensor(b"b", [32], Q4_0, 0)],
        )
    )
    with GgufFile(path) as file:
        values = {key: file.get(key) for key in file}
        assert values == {"n": -5, "t": "é", "l": ["x", ""], "f": [0.5, -1.0]}
        assert file.tensors["a"].shape == (2, 4)
        assert np.array_equal(file.data(file.tensors["a"]), np.zeros((2, 4)))
        assert file.data(file.tensors["b"]).shape == (18,)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    return write_gguf(folder, folder / "m.gguf", "q8_0").read_bytes()


def open_all(path: Path) -> None:
    """All that LLM does with a file before its first step."""
    load_tokenizer(None, path)
    load_model(path, max_rows=4, max_seq_len=16)


def survives(path: Path, content: bytes, note: Any) -> bool:
    """Whether the file loads; anything but a ModelError fails the test."""
    path.write_bytes(content)
    began = time.process_time()
    try:
        open_all(path)
        return True
    except ModelError as error:
        assert str(path) in str(error), note
        return False
    finally:
        assert time.process_time() - began < SECONDS, note


def test_truncated_anywhere(source: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert survives(path, source, "whole")
    rng = random.Random(1)
    for length in sorted(rng.sample(range(len(source) - 32), 40)):
        assert not survives(path, source[:length], length)


def mutate(source: bytes, rng: random.Random) -> bytes:
    """Some bytes of the head, or eight of them as a number that is too large or too small."""
    content = bytearray(source)
    head = source.index(b"output_norm.weight")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(4, head)
        if rng.random() < 0.5:
            content[at] = rng.randrange(256)
        else:
            number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, rng.randrange(2**20)))
            content[at : at + 8] = struct.pack("<Q", number)
    return bytes(content)


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutated_heads(count: int, source: bytes, tmp_path: Path) -> None:
    rng = random.Random(count)
    path = tmp_path / "m.gguf"
    loaded = sum(survives(path, mutate(source, rng), index) for index in range(count))
    assert loaded < count


_ID = "expected a token id, a whole number >= 0"
# Entry -> a value of a wrong type, and what is said of it.
WRONG_TYPES: list[tuple[str, Any, str]] = [
    *[(f"tokenizer.ggml.{name}_token_id", value, _ID)
      for name in ("eos", "eot", "bos", "padding", "unknown")
      for value in ([1, 2], "x", float("nan"), True, -1)],
    *[("tokenizer.ggml.tokens", value, "expected an array of texts")
      for value in (5, "abc", [1, 2, 3])],
    ("tokenizer.ggml.merges", [1, 2], "expected an array of texts"),
    ("tokenizer.ggml.token_type", ["x"], "expected an array of whole numbers"),
    ("tokenizer.ggml.scores", ["x"], "expected an array of numbers"),
    ("tokenizer.ggml.model", 3, "expected a text"),
    ("tokenizer.ggml.pre", ["smollm"], "expected a text"),
    ("tokenizer.ggml.add_bos_token", "yes", "expected true or false"),
    ("tokenizer.chat_template", 5, "expected a text"),
    ("llama.rope.scaling.type", ["none"], "expected a text"),
    ("llama.attention.sliding_window", "4", "expected a number 0..6.71089e+07"),
    ("llama.attention.head_count", 2.5, "expected a whole number 1..65536"),
    ("llama.expert_count", [0], "expected a number 0..65536"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "reason"), WRONG_TYPES)
def test_entries_of_a_wrong_type(key: str, value: Any, reason: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "folder")
    path = write_gguf(folder, tmp_path / "m.gguf", "q8_0", entries={key: value})
    with pytest.raises(ModelError) as error:
        open_all(path)
    assert str(error.value).startswith(f"{path}: {key} = ") and reason in str(error.value)


def test_memory_does_not_follow_what_a_file_states(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    tracemalloc.start()
    try:
        for content, _ in BROKEN.values():
            path.write_bytes(content[: 1 << 20])
            with pytest.raises(ModelError):
                GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
