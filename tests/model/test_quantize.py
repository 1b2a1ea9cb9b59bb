"""LLM(quantization=...): rounding at load, and what runs then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gguf_files import write_gguf
from reference.quant_reference import read_groups
from specdec_ext import LLM, ConfigError, ModelError, SamplingParams, _core
from specdec_ext.config.quantization import Quantization
from specdec_ext.errors import UnsupportedModelError
from specdec_ext.models import load_model
from specdec_ext.models.quantize import e4m3_codes, to_blocks
from specdec_ext.workflow.convert import ConvertOptions, convert
from tiny_models import save_llama

SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.mark.parametrize("format", ["q8_0", "q4_1"])
def test_blocks_are_those_of_the_gguf_package_or_as_near(format: str) -> None:
    """Half a step of the block's scale at most, plus what rounding the scale itself costs."""
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(70, 256, generator=torch.Generator().manual_seed(1)) * 0.2
    weight[3, :32], weight[4, 32:64] = 0, 0.75
    values = read_groups(format, to_blocks(weight, format)).values()
    kind = gguf.GGMLQuantizationType[format.upper()]
    theirs = gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind)
    groups = weight.numpy().reshape(70, -1, 32)
    span = np.abs(groups).max(-1) / 127 if format == "q8_0" else np.ptp(groups, axis=-1) / 15
    off, their_off = (np.abs(v - weight.numpy()).reshape(groups.shape) for v in (values, theirs))
    slack = 2.0**-10 * np.abs(groups).max(-1)[..., None]
    assert (off <= span[..., None] / 2 + slack).all()
    assert np.square(off).sum() <= 1.01 * np.square(their_off).sum()


def test_e4m3_codes_are_the_nearest() -> None:
    """Against torch's conversion: every float that lies on a tie and its neighbours, and others."""
    codes = np.arange(0x7F, dtype=np.uint8)
    exact = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    ties = (exact[:-1] + exact[1:]) / 2
    near = [np.nextafter(ties, np.float32(x)) for x in (0, 1000)]
    drawn = torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * 3
    values = np.concatenate([exact, ties, *near, drawn.numpy(), np.float32([1e-30, 2.0**-10, 448])])
    values = np.concatenate([values, -values]).astype(np.float32)
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(e4m3_codes(values), expected)
    assert np.array_equal(e4m3_codes(np.float32([449, -1e9])), np.array([0x7E, 0xFE]))


@pytest.mark.parametrize(("format", "share"), [("f8_g", 64), ("f8_a8", 256)])
def test_fp8_loses_half_a_step(format: str, share: int) -> None:
    """A scale is that of 64 elements, or of a row, so that libraries can multiply it."""
    weight = torch.randn(70, 256, generator=torch.Generator().manual_seed(1)) * 0.2
    weight[3, :64], weight[5, 64:128], weight[6] = 0, 1e-30, 0
    values = np.empty((70, 256), np.float32)
    blocks = to_blocks(weight, format)
    _core.dequantize((blocks, format), values)
    scales = blocks.reshape(70, 4, 68)[..., :4]
    assert (scales == scales[:, :1]).all() == (format == "f8_a8")
    size = np.abs(weight.numpy())
    groups = size.reshape(70, -1, share)
    scale = groups.max(-1, keepdims=True).repeat(share, -1).reshape(70, 256) / 448
    # 3 bits behind the leading one, and below 2^-6 steps of 2^-9; the scale's own rounding.
    step = np.maximum(size / 16, scale * 2.0**-10) * (1 + 2.0**-20)
    assert (np.abs(values - weight.numpy()) <= step).all()


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8", "fp8_w8a8"])
def test_tables_are_the_rounded_ones(quantization: str, tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "folder", 3, 48, **SIZES)
    model, floats = load_model(folder, quantization=quantization), load_model(folder)
    assert model.info.dtype == quantization and model.kv_dtype == torch.float32
    assert model.info.weight_bytes < 0.5 * floats.info.weight_bytes
    ids = torch.arange(48, dtype=torch.int32)
    for found, source in (
        (model.embed(ids), floats.embed(ids)),
        (model.head_rows(ids), floats.head_rows(ids)),
    ):
        expected = read_groups("q8_0", to_blocks(source, "q8_0")).values()
        assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8", "fp8_w8a8"])
def test_greedy_text_is_plain(quantization: str, tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "folder", 3, 48, **SIZES)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [[1, 2, 3, 4] * 5, [7], list(range(30))]
    texts = []
    for config in (None, {"method": "ngram", "adaptive": False}):
        llm = LLM(folder, speculative_config=config, quantization=quantization, max_seq_len=96)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts.append([out.outputs[0].token_ids for out in outputs])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("group", [64, 128, 0])
@pytest.mark.parametrize("format", ["q8_g", "q4_g", "f8_g"])
def test_blocks_of_a_group_share_its_scale(format: str, group: int) -> None:
    """Half a step of the group's scale at most; 0: a whole row is a group."""
    weight = torch.randn(70, 256, generator=torch.Generator().manual_seed(1)).numpy() * 0.2
    weight[3, :128], weight[5, 64:128], weight[6] = 0, 1e-30, 0.75
    weight[7, 0] = 1e6  # beyond float16
    blocks = to_blocks(weight, format, group)
    values = np.empty((70, 256), np.float32)
    _core.dequantize((blocks, format), values)
    size = group or 256
    per_row = 256 // {"q8_g": 32, "q4_g": 32, "f8_g": 64}[format]
    head = 8 if format == "q4_g" else 4  # bytes of the scale, and of the minimum
    heads = blocks.reshape(70, 256 // size, per_row * size // 256, -1)[..., :head]
    assert (heads == heads[:, :, :1]).all()
    groups = weight.reshape(70, -1, size)
    peak = np.abs(groups).max(-1, keepdims=True)
    if format == "f8_g":
        floor = np.broadcast_to(peak / 448 * 2.0**-10, groups.shape)
        step = 2 * np.maximum(np.abs(groups) / 16, floor)
    else:
        step = np.ptp(groups, axis=-1)[..., None] / 15 if format == "q4_g" else peak / 127
    off = np.abs(values.reshape(groups.shape) - groups)
    assert (off <= step / 2 * (1 + 2.0**-18) + peak * 2.0**-20).all()
    assert off.max() > 0
    if format == "q4_g":  # what a device keeps in 4 bits
        assert not (np.ascontiguousarray(heads[..., :4]).view(np.uint32) & 15).any()


@pytest.mark.parametrize(("method", "group"), [
    ("int8", 64), ("int8", -1), ("int4", 64), ("int4", 128), ("int4", -1), ("fp8", 128),
    ("fp8_w8a8", -1),
])  # fmt: skip
def test_groups_of_a_mapping(method: str, group: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    folder = save_llama(tmp_path / "folder", 3, 48, **sizes)
    how = {"method": method, "group_size": group}
    model = load_model(folder, quantization=how)
    if method == "fp8_w8a8":
        assert model.info.dtype == method  # its only groups
    else:
        assert model.info.dtype == f"{method} (group_size={group})"
    own = dict(load_model(folder, quantization=method).quantization_errors)  # type: ignore[attr-defined]
    found = dict(model.quantization_errors)  # type: ignore[attr-defined]
    name = "model.layers.0.mlp.down_proj.weight"
    assert found["lm_head.weight"] == own["lm_head.weight"]  # tables have groups of their own
    if method == "fp8_w8a8":
        assert found == own
    elif method != "fp8":  # e4m3 loses about the same in any group
        assert own[name] < found[name] < 3 * own[name]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    texts = []
    for config in (None, {"method": "ngram", "adaptive": False}):
        llm = LLM(folder, speculative_config=config, quantization=how, max_seq_len=96)
        outputs = llm.generate([[1, 2, 3, 4] * 5, [7]], params, use_tqdm=False)
        texts.append([out.outputs[0].token_ids for out in outputs])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["keep", "int8", "int4", "fp8"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_the_tables_become(kind: str, tied: bool, tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "folder", 3, 48, **SIZES, tie_word_embeddings=tied)
    floats = load_model(folder, dtype="float32")
    ids = torch.arange(48, dtype=torch.int32)
    rounded: dict[str, np.ndarray] = {}
    for name, source in (("embeddings", floats.embed(ids)), ("head", floats.head_rows(ids))):
        format = {"keep": None, "int8": "q8_0", "int4": "q4_1", "fp8": "f8_g"}[kind]
        rounded[name] = source.numpy()
        if format is not None:
            rounded[name] = np.empty_like(rounded[name])
            _core.dequantize((to_blocks(source.numpy(), format), format), rounded[name])
    for name in rounded:
        model = load_model(folder, quantization={"method": "int4", name: kind})
        found = {"embeddings": model.embed(ids).numpy(), "head": model.head_rows(ids).numpy()}
        assert np.array_equal(found[name], rounded[name])
        other = "head" if name == "embeddings" else "embeddings"
        source = {"embeddings": floats.embed, "head": floats.head_rows}[other](ids)
        default = read_groups("q8_0", to_blocks(source.numpy(), "q8_0")).values()
        assert np.array_equal(found[other], rounded[other] if tied else default)
        assert model.info.dtype == f"int4 ({name}={kind})"
        assert not any("stay in" in note for note in model.info.warnings)


def test_a_table_that_is_kept_has_the_models_dtype(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "folder", 3, 48, **SIZES)
    kept = {"method": "int8", "embeddings": "keep", "head": "keep"}
    model = load_model(folder, quantization=kept, dtype="bfloat16")
    floats = load_model(folder, dtype="bfloat16")
    narrow = load_model(folder, quantization="int8", dtype="bfloat16")
    ids = torch.arange(48, dtype=torch.int32)
    assert torch.equal(model.embed(ids), floats.embed(ids))
    assert torch.equal(model.head_rows(ids), floats.head_rows(ids))
    assert narrow.info.weight_bytes < model.info.weight_bytes < floats.info.weight_bytes


def test_tables_of_a_tied_model_are_one(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "folder", 3, 48, **SIZES, tie_word_embeddings=True)
    both = {"method": "int8", "embeddings": "int4", "head": "keep"}
    with pytest.raises(ConfigError, match=r"embeddings = 'int4', quantization.head = 'keep': the"):
        load_model(folder, quantization=both)
    load_model(folder, quantization={**both, "head": "int4"})


@pytest.mark.parametrize(("value", "words"), [
    ({}, r"quantization.method = None: expected one of int8, int4, fp8, fp8_w8a8"),
    ({"method": "int7"}, r"quantization.method = 'int7': expected one of"),
    ({"method": "int4", "groupsize": 64}, "unknown key 'groupsize'; did you mean 'group_size'"),
    ({"method": "int4", "group_size": 48}, r"group_size = 48: .* a multiple of 32 up to 65536"),
    ({"method": "int4", "group_size": 16}, r"group_size = 16: out of range, allowed 32..65536"),
    ({"method": "int4", "group_size": 0}, r"group_size = 0: out of range"),
    ({"method": "int4", "group_size": 1 << 20}, r"group_size = 1048576: out of range"),
    ({"method": "int4", "group_size": "64"}, r"group_size = '64': expected an integer"),
    ({"method": "int4", "group_size": True}, r"group_size = True: expected an integer"),
    ({"method": "fp8", "group_size": 32}, r"group_size = 32: out of range, allowed 64..65536"),
    ({"method": "fp8_w8a8", "group_size": 64}, r"group_size = 64: fp8_w8a8 has one scale"),
    ({"method": "int4", "head": "q6_k"}, r"quantization.head = 'q6_k': expected one of keep, int8"),
    ({"method": "int4", "embeddings": 8}, r"quantization.embeddings = 8: expected one of keep"),
    (["int4"], r"quantization = \['int4'\]: expected one of int8"),
])  # fmt: skip
def test_mappings_are_checked(value: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(tmp_path, quantization=value)  # type: ignore[arg-type]


def test_what_says_no_more_than_a_name_is_the_name() -> None:
    for name, size in (("int8", 32), ("int4", 32), ("fp8", 64), ("fp8_w8a8", -1)):
        for value in (name, {"method": name}, {"method": name, "group_size": size}):
            assert Quantization.of(value).plain == name
    said = {"method": "int4", "group_size": 128, "embeddings": "keep", "head": "int8"}
    assert Quantization.of(said).plain == said
    assert Quantization.of(Quantization.of(said).plain) == Quantization.of(said)


def test_rows_that_are_no_whole_groups_stay_in_the_checkpoints_dtype(tmp_path: Path) -> None:
    how = {"quantization": "int8", "dtype": "bfloat16"}
    folder = save_llama(tmp_path / "folder", 3, 48, hidden_size=64, intermediate_size=80)
    model = load_model(folder, **how)
    wider = save_llama(tmp_path / "whole", 3, 48, hidden_size=64, intermediate_size=96)
    whole = load_model(wider, **how)
    # 2 layers: down_proj [64, 80] in bfloat16 in the place of [64, 96] in blocks; the rows of gate
    # and up are packed in numbers that are the same for both.
    more = model.info.weight_bytes - whole.info.weight_bytes
    assert more <= 2 * 64 * (80 * 2 - 96 * 34 // 32)
    [note] = [note for note in model.info.warnings if "stay in" in note]
    assert note == (
        "quantization = 'int8': 2 matrices stay in bfloat16, their rows are no whole groups of 32: "
        "model.layers.0.mlp.down_proj.weight, model.layers.1.mlp.down_proj.weight"
    )
    assert not any("stay in" in note for note in whole.info.warnings)
    names = dict(model.quantization_errors)  # type: ignore[attr-defined]
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert "model.layers.0.mlp.down_proj.weight" not in names


def test_a_model_of_which_nothing_can_be_narrowed(tmp_path: Path) -> None:
    odd = {"hidden_size": 40, "intermediate_size": 72, "head_dim": 8, "num_attention_heads": 5,
           "num_key_value_heads": 1}  # fmt: skip
    folder = save_llama(tmp_path / "odd", 3, 48, **odd)
    with pytest.raises(UnsupportedModelError, match="no matrix of this model has rows in whole gr"):
        load_model(folder, quantization="int8")
    with pytest.raises(UnsupportedModelError, match="in whole groups of 32; leave it out"):
        convert(folder, tmp_path / "out", ConvertOptions(quantization="int4"))


def test_refusals(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "folder", 3, 48, **SIZES)
    with pytest.raises(ConfigError, match="quantization = 'int7': expected one of int8, int4, fp8"):
        LLM(folder, quantization="int7")
    with pytest.raises(UnsupportedModelError, match="'int8' needs the native decoder"):
        load_model(folder, quantization="int8", model_impl="transformers")
    file = write_gguf(folder, tmp_path / "m.gguf", "q8_0", tokenizer=False)
    with pytest.raises(UnsupportedModelError, match="have a width already"):
        load_model(file, quantization="int8")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"][5, 7] = 1e8
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1.*o_proj.*row 5.*q8_0 that is not finite"):
        load_model(folder, quantization="int8")
