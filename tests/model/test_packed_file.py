"""Packed weights in a file: the bits of weights packed at load, and files that are refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_files import write_gguf
from specdec_ext import _core
from specdec_ext.config.quantization import Quantization
from specdec_ext.errors import ModelError
from specdec_ext.models.config_reader import read_config
from specdec_ext.models.native import NativeModel
from specdec_ext.models.native_config import native_shape
from specdec_ext.models.packed_file import PackedFile
from specdec_ext.models.packed_model import PackedWeights, find_packed, pack_model
from specdec_ext.models.shard import Shard
from tiny_models import save_llama, save_tiny

PAGE, PAGES = 8, 8
HEAD = struct.Struct("<8sIIQ32s8x")
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MAPPING = {"method": "int4", "group_size": 64, "embeddings": "int8", "head": "keep"}


def load(path: Path, packed: PackedFile | None = None, **options: Any) -> NativeModel:
    config = read_config(path)
    options = {"dtype": "float32", "max_rows": 32, **options}
    if options.get("quantization") is not None:
        options["quantization"] = Quantization.of(options["quantization"])
    model = NativeModel(
        config, native_shape(config), options.pop("dtype"), impl_reason="", packed=packed, **options
    )
    shape = (model.num_layers, PAGES, model.num_kv_heads, PAGE, model.head_dim)
    model.bind_cache(*(_core.LazyZeros(shape, model.kv_dtype_name) for _ in range(2)))
    return model


def pack(path: Path, model: NativeModel, source: Path, **wanted: Any) -> Path:
    config = read_config(source)
    how = {"dtype": "float32", "own_widths": False, "quantization": None, **wanted}
    pack_model(path, model, config, native_shape(config), PackedWeights(**how), sources={},
               rebuild=("specdec", "build", "--x"))  # fmt: skip
    return path


def scores(model: NativeModel) -> np.ndarray:
    plan = _core.make_step_plan(
        [[1, 5, 9, 100, 7, 77, 3]], kv_len=[0], page_table=[[0, 1, 2]], logits_for_all_rows=True
    )
    return model.forward(plan)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny")


@pytest.fixture
def packed(tiny: Path, tmp_path: Path) -> Path:
    return pack(tmp_path / "packed.bin", load(tiny), tiny)


# -- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8", MAPPING])
def test_bits_of_a_folder(dtype: str, quantization: Any, tiny: Path, tmp_path: Path) -> None:
    how = {"dtype": dtype, "quantization": quantization}
    one = load(tiny, **how)
    path = pack(tmp_path / "packed.bin", one, tiny, **how)
    other = load(tiny, PackedFile.open(path), **how)
    assert np.array_equal(scores(one), scores(other))
    assert other.info == one.info
    ids = np.array([0, 3, 255], dtype=np.int32)
    for name in ("embed", "head_rows"):
        assert np.array_equal(getattr(one, name)(ids), getattr(other, name)(ids))


@pytest.mark.parametrize(
    "format",
    [
        "q8_0",
        "q4_0",
        "q4_1",
        "q5_0",
        "q5_1",
        "q4_k",
        "q5_k",
        "q6_k",
        "bfloat16",
        {"v_proj": "q6_k", "": "q4_k"},
    ],
)
def test_bits_of_a_gguf_file(format: Any, tmp_path: Path) -> None:
    """q, k and v of several widths are several packs."""
    file = write_gguf(save_tiny(tmp_path / "folder", **WIDE), tmp_path / "model.gguf", format)
    one = load(file, own_widths=True)
    path = pack(tmp_path / "packed.bin", one, file, own_widths=True)
    other = load(file, PackedFile.open(path), own_widths=True)
    assert np.array_equal(scores(one), scores(other))
    assert other.info == one.info


@pytest.mark.parametrize(
    "family", ["llama_biased", "gemma2", "gemma3", "qwen3_biased", "qwen2", "phi3_window"]
)
def test_bits_of_other_families(saved: Any, family: str, tmp_path: Path) -> None:
    """Biases, norms of heads and behind blocks, tied embeddings, several rotary tables."""
    folder = saved(family).folder
    one = load(folder)
    path = pack(tmp_path / "packed.bin", one, folder)
    assert np.array_equal(scores(one), scores(load(folder, PackedFile.open(path))))


@pytest.mark.parametrize("tied", [False, True])
def test_each_rank_has_a_file(tied: bool, tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model", 3, 300, tie_word_embeddings=tied)
    shape = native_shape(read_config(folder))
    for rank in range(2):
        shard = Shard.of(shape, rank, 2)
        one = load(folder, shard=shard)
        path = pack(tmp_path / f"{rank}.bin", one, folder, rank=rank, ranks=2)
        other = load(folder, PackedFile.open(path), shard=shard)
        pieces = [_core.decoder_packs(model.core) for model in (one, other)]
        assert [[*p[:4], bytes(p[4])] for p in pieces[0]] == (
            [[*p[:4], bytes(p[4])] for p in pieces[1]]
        )


def test_nothing_is_copied_and_nothing_written(packed: Path, tiny: Path) -> None:
    """The pieces of a mapped decoder lie in the file's pages, one behind the other."""
    model = load(tiny, PackedFile.open(packed))
    data = packed.read_bytes()
    places = []
    for name, _, _, k, view in _core.decoder_packs(model.core):
        assert view.readonly
        if k > 0:
            places.append(np.frombuffer(view, "u1").ctypes.data)
            assert bytes(view) in data, name
    assert places == sorted(places) and places[-1] - places[0] < len(data)
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps if line.rstrip().endswith(str(packed))]
    assert [line[1] for line in lines] == ["r--p"]


def test_the_layout_is_the_one_of_its_number() -> None:
    """Whoever changes what the bytes of a pack mean raises kPackLayout: files would be misread."""
    rng = np.random.default_rng(5)
    digest = hashlib.sha256()
    for format, size in (("q8_0", 34), ("q4_0", 18), ("q4_1", 20), ("q4_k", 144), ("q5_k", 176),
                         ("q6_k", 210)):  # fmt: skip
        blocks = 8 if size < 100 else 1
        weight = rng.integers(0, 256, (40, blocks * size), dtype=np.uint8)
        weight = weight & 0x37 | 0x01  # no scale is infinite
        digest.update(_pack_bytes((weight, format), 256))
    for kind in (np.float32, np.float16):
        digest.update(_pack_bytes(rng.random((40, 255)).astype(kind), 255))
    assert (_core.PACK_LAYOUT, digest.hexdigest()[:16]) == (1, "2586c82e9746ec2d")


def _pack_bytes(weight: Any, columns: int) -> bytes:
    """The pack of a weight [40, columns], as the head of a decoder has it."""
    decoder = _core.LlamaDecoder(
        vocab_size=40, hidden_size=columns, intermediate_size=32, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=8, max_rows=1, max_position=1, rms_norm_eps=1e-5,
        activation="silu", attention_scale=1.0, rope_index=[-1], sliding_window=[0],
    )  # fmt: skip
    ones = np.ones(columns, dtype=np.float32)
    rows = {"q_proj": (8, columns), "k_proj": (8, columns), "v_proj": (8, columns),
            "o_proj": (columns, 8)}  # fmt: skip
    layer: dict[str, Any] = {
        f"self_attn.{name}.weight": np.ones(shape, dtype=np.float32) for name, shape in rows.items()
    }
    for name, shape in (("gate", (32, columns)), ("up", (32, columns)), ("down", (columns, 32))):
        layer[f"mlp.{name}_proj.weight"] = np.ones(shape, dtype=np.float32)
    layer |= {f"{name}_layernorm.weight": ones for name in ("input", "post_attention")}
    decoder.set_layer(0, layer)
    decoder.set_final_norm(ones)
    decoder.set_embedding(np.ones((40, columns), dtype=np.float32))
    decoder.set_head(weight)
    return next(bytes(view) for name, _, _, _, view in _core.decoder_packs(decoder)
                if name == "head")  # fmt: skip


# -- files that are not what they were ------------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The header with a change, its sha256 put right."""
    data = path.read_bytes()
    magic, version, layout, length, _ = HEAD.unpack(data[: HEAD.size])
    header = json.loads(data[HEAD.size : HEAD.size + length])
    begin = -(-(HEAD.size + length) // 4096) * 4096
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    head = HEAD.pack(magic, version, layout, len(text), hashlib.sha256(text).digest())
    place = -(-(HEAD.size + len(text)) // 4096) * 4096
    path.write_bytes((head + text).ljust(place, b"\0") + data[begin:])


def set_piece(field: int, value: Any, place: int = 1) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["pieces"][place].__setitem__(field, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_piece(2, 1 << 40), r"header.pieces\[1\].*no weight"),
        (set_piece(2, -1), r"header.pieces\[1\].*no weight"),
        (set_piece(2, 1 << 70), r"header.pieces\[1\]"),
        (set_piece(4, 1 << 50), r"header.pieces\[1\].*outside the file"),
        (set_piece(4, 0), r"header.pieces\[1\].*within another piece"),
        (set_piece(4, 4097, 3), r"header.pieces\[3\]"),
        (set_piece(1, "q9_9"), r"header.pieces\[1\].*type 'q9_9'"),
        (set_piece(5, "0" * 64), "sha256 is .* expected 0000"),
        (set_piece(0, "layers.7.o"), "missing"),
        (lambda h: h["pieces"].pop(3), "missing"),
        (lambda h: h["pieces"].append(None), r"header.pieces\[\d+\] = None: expected 6 fields"),
        (lambda h: h.pop("config"), "header.config = None: expected dict"),
        (lambda h: h["config"].update(hidden_size=64), "header.config.hidden_size = 64, the model"),
        (lambda h: h["config"].update(extra=1), "header.config.extra = 1"),
        (lambda h: h.update(bytes=h["bytes"] + 64), "the header tells of"),
        (lambda h: h.update(ropes={"0": [3, 3]}), "has no such tables"),
        (lambda h: h.update(ropes={}), "has no entry in ropes"),
    ],
)
def test_a_header_that_lies_is_refused(
    change: Callable[[dict[str, Any]], object], words: str, packed: Path, tiny: Path
) -> None:
    rewrite(packed, change)
    with pytest.raises(ModelError, match=f"packed.bin: .*{words}.*specdec build --x") as raised:
        load(tiny, PackedFile.open(packed))
    assert str(packed) in str(raised.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:40], "not a file of packed weights"),
        (lambda data: b"", "not a file of packed weights"),
        (lambda data: data[: HEAD.size + 10], "header of .* bytes in a file of"),
        (lambda data: data[:-1], "the header tells of"),
        (lambda data: data + b"\0" * 64, "the header tells of"),
        (lambda data: b"X" + data[1:], "not a file of packed weights"),
        (lambda data: data[:8] + b"\x09" + data[9:], "version 9, this specdec_ext reads 1"),
        (lambda data: data[:12] + b"\x63" + data[13:], "layout of packs 99, this specdec_ext"),
        (lambda data: data[:16] + b"\xff" * 8 + data[24:], "header of 18446744073709551615 bytes"),
        (lambda data: data[:80] + bytes([data[80] ^ 1]) + data[81:], "header: sha256"),
        (lambda data: data[:-9000] + bytes([data[-9000] ^ 1]) + data[-8999:], "sha256 is"),
    ],
)
def test_a_damaged_file_is_refused(
    damage: Callable[[bytes], bytes], words: str, packed: Path, tiny: Path
) -> None:
    packed.write_bytes(damage(packed.read_bytes()))
    with pytest.raises(ModelError, match=f"packed.bin: .*{words}"):
        load(tiny, PackedFile.open(packed))


def test_what_is_altered_behind_a_load_is_seen(packed: Path, tiny: Path) -> None:
    """The pieces are hashed once, until the file changes."""
    opened = PackedFile.open(packed)
    load(tiny, opened)
    data = bytearray(packed.read_bytes())
    data[-5000] ^= 4
    packed.write_bytes(data)
    with pytest.raises(ModelError, match="was altered or is damaged"):
        load(tiny, opened)


def test_mutated_files(packed: Path, tiny: Path) -> None:
    """Nothing but a ModelError, quickly, whatever byte of the head and header is another; where
    nothing that is read has changed, the scores have not either."""
    whole = packed.read_bytes()
    expected = scores(load(tiny))
    length = HEAD.unpack(whole[: HEAD.size])[3]
    rng = random.Random(3)
    refused = 0
    for number in range(300):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            at = rng.randrange(HEAD.size + length if number % 3 else len(data))
            data[at] ^= 1 << rng.randrange(8)
        if number % 7 == 0:
            del data[rng.randrange(len(data)) :]
        packed.write_bytes(data)
        begin = time.process_time()
        try:
            found = scores(load(tiny, PackedFile.open(packed)))
        except ModelError as error:
            assert str(packed) in str(error)
            refused += 1
        else:
            assert np.array_equal(found, expected)
        assert time.process_time() - begin < 2
    assert refused > 200


# -- which file is taken --------------------------------------------------------------------------


def find(folder: Path, **wanted: Any) -> PackedFile | None:
    config = read_config(folder)
    how = {"dtype": "float32", "own_widths": False, "quantization": None, **wanted}
    return find_packed(config, native_shape(config), PackedWeights(**how))


def test_a_file_for_something_else_is_not_taken(tiny: Path) -> None:
    assert find(tiny) is None
    pack(tiny / "packed.bin", load(tiny), tiny)
    assert find(tiny) is not None
    for other in ({"dtype": "bfloat16"}, {"quantization": "int8"}, {"rank": 1, "ranks": 2}):
        assert find(tiny, **other) is None


def test_a_file_for_the_same_mapping_is_taken(tiny: Path) -> None:
    pack(tiny / "packed.bin", load(tiny, quantization=MAPPING), tiny, quantization=MAPPING)
    assert find(tiny, quantization=MAPPING) is not None
    for other in (None, "int4", {**MAPPING, "group_size": 128}):
        assert find(tiny, quantization=other) is None


def test_other_weights_than_were_packed_are_refused(tiny: Path) -> None:
    config, source = read_config(tiny), tiny / "model.safetensors"
    about = {"bytes": source.stat().st_size, "mtime_ns": source.stat().st_mtime_ns,
             "sha256": hashlib.sha256(source.read_bytes()).hexdigest()}  # fmt: skip
    pack_model(tiny / "packed.bin", load(tiny), config, native_shape(config),
               PackedWeights("float32", False, None), sources={source.name: about})  # fmt: skip
    assert find(tiny) is not None
    os.utime(source, ns=(1, 1))  # copied: another time, the same bytes
    assert find(tiny) is not None
    data = bytearray(source.read_bytes())
    data[-1] ^= 1
    source.write_bytes(data)
    with pytest.raises(ModelError, match=r"packed from another model.safetensors.*build"):
        find(tiny)
    source.unlink()
    with pytest.raises(ModelError, match="cannot be compared"):
        find(tiny)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.append(p[0]), "given twice"),
        (lambda p: p.append(("layers.0.x", "float32", 3, 0, 0)), "no such piece"),
        (lambda p: p.__setitem__(0, (*p[0][:4], 3)), "multiple of 64"),
        (lambda p: p.__setitem__(0, (*p[0][:4], 1 << 40)), "not in the file"),
        (lambda p: p.__setitem__(0, (*p[0][:2], 1 << 50, *p[0][3:])), "is no weight"),
        (lambda p: p.__setitem__(0, (p[0][0], "q4_k", *p[0][2:])), "is no weight"),
        (lambda p: p.__setitem__(0, (*p[0][:2], p[0][2] - 1, *p[0][3:])), "shape"),
        (lambda p: p.pop(0), "missing"),
    ],
)
def test_the_core_checks_what_it_maps(
    change: Callable[[list[Any]], object], words: str, packed: Path, tiny: Path
) -> None:
    """Whatever Python has checked before: no read leaves the file."""
    opened = PackedFile.open(packed)
    pieces = [piece[:5] for piece in opened._pieces if not piece[0].startswith("rope")]
    change(pieces)
    decoder = load(tiny).core
    with packed.open("rb") as file, pytest.raises(ValueError, match=words):
        _core.map_packs(decoder, file.fileno(), "name", pieces)


def test_no_file_to_map(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with (
        (tmp_path / "empty").open("rb") as file,
        pytest.raises(ValueError, match=r"name: cannot be mapped \(it is empty"),
    ):
        _core.map_packs(load(tiny).core, file.fileno(), "name", [])
    with pytest.raises(ValueError, match="name: cannot be mapped"):
        _core.map_packs(load(tiny).core, -1, "name", [])
