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
from specdec_ext.errors import UnsupportedModelError
from specdec_ext.models import load_model
from specdec_ext.models.quantize import e4m3_codes, to_blocks
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


def test_rows_that_are_no_whole_blocks_stay(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "folder", 3, 48, hidden_size=64, intermediate_size=80)
    model = load_model(folder, quantization="int8")
    whole = load_model(
        save_llama(tmp_path / "whole", 3, 48, hidden_size=64, intermediate_size=64),
        quantization="int8",
    )
    # 2 layers: down_proj [64, 80] in float32 instead of [64, 64] in blocks.
    assert model.info.weight_bytes - whole.info.weight_bytes >= 2 * 64 * (80 * 4 - 64 * 34 // 32)


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
