"""Layers of a drafter's network on the CPU: which width they have, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gguf_files import write_gguf
from reference.quant_reference import read_groups
from specdec_ext import LLM
from specdec_ext.drafters.packed_layer import drafter_format, pack_layer
from specdec_ext.models import load_model
from specdec_ext.models.quantize import to_blocks
from tiny_models import save_llama

SIZES = {"hidden_size": 64, "intermediate_size": 1024}  # most of the weights


def rows_of(layer: Any) -> np.ndarray:
    """The weight that the layer multiplies."""
    out = np.empty((layer.out_features, layer.in_features), dtype=np.float32)
    layer.unpack_rows(np.arange(layer.out_features, dtype=np.int32), out)
    return out


@pytest.mark.parametrize(
    ("how", "format"),
    [
        ({"dtype": "float32"}, None), ({"dtype": "bfloat16"}, "q8_0"),
        ({"dtype": "float16"}, "q8_0"), ({"dtype": "bfloat16", "quantization": "int8"}, "q8_0"),
        ({"dtype": "bfloat16", "quantization": "int4"}, "q4_1"),
        ({"dtype": "bfloat16", "quantization": "fp8"}, "q8_0"),
    ],
)  # fmt: skip
def test_the_width_follows_the_targets(
    tmp_path: Path, how: dict[str, Any], format: str | None
) -> None:
    folder = save_llama(tmp_path / "m", 2, 97, **SIZES)
    assert drafter_format(load_model(folder, max_rows=8, **how)) == format


@pytest.mark.parametrize(("width", "format"), [("q4_0", "q4_1"), ("q8_0", "q8_0")])
def test_the_width_follows_a_gguf_files(tmp_path: Path, width: str, format: str) -> None:
    folder = save_llama(tmp_path / "m", 2, 97, **SIZES)
    file = write_gguf(folder, tmp_path / "m.gguf", width, tokenizer=False)
    model = load_model(file, max_rows=8)
    narrow = drafter_format(model)
    assert narrow == (None if model.kv_dtype_name == "float32" else format)


def test_the_width_of_a_model_that_says_little() -> None:
    assert drafter_format(SimpleNamespace(kv_dtype=torch.float32)) is None
    assert drafter_format(SimpleNamespace(kv_dtype=torch.bfloat16)) == "q8_0"


@pytest.mark.parametrize("format", ["q8_0", "q4_1"])
def test_layers_stand_for_their_blocks(format: str) -> None:
    rng = np.random.default_rng(1)
    weights = [rng.standard_normal((n, 96)).astype(np.float32) for n in (5, 40)]
    bias = rng.standard_normal(45).astype(np.float32)
    layer = pack_layer(weights, bias, "bfloat16", format)
    blocks = np.concatenate([to_blocks(weight, format) for weight in weights])
    expected = read_groups(format, blocks).values()
    assert layer.dtype == format and np.array_equal(rows_of(layer), expected)
    found = np.empty((1, 45), dtype=np.float32)
    layer.run(np.zeros((1, 96), dtype=np.float32), found)
    assert np.array_equal(found[0], bias)
    # What it costs: half a step of the blocks.
    whole = np.concatenate(weights)
    off = np.linalg.norm(expected - whole) / np.linalg.norm(whole)
    assert off < (0.007 if format == "q8_0" else 0.09)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("depth", "format"), [(40, "q8_0"), (48, "q4_1"), (64, None)])
def test_rows_of_no_whole_blocks_stay_floats(depth: int, format: str | None, dtype: str) -> None:
    weight = np.random.default_rng(2).standard_normal((33, depth)).astype(np.float32)
    layer = pack_layer([weight], None, dtype, format)
    expected = torch.from_numpy(weight).to(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(rows_of(layer), expected)


@pytest.mark.usefixtures("default_model_path")
def test_the_shipped_redrafter_is_in_few_bits() -> None:
    """Beside the default file, in 4 bits: 6.7 million weights."""
    with LLM(max_seq_len=256, speculative_config={"method": "redrafter"}) as llm:
        llm.generate(["One, two,"], use_tqdm=False)
        held = llm.get_metrics()["drafter"]["memory_bytes"]
    assert 6.7e6 * 5 / 8 < held < 6.8e6 * 5 / 8
