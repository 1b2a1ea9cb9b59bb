"""Rotary tables against the rotary modules of transformers, and against exact values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from model_zoo import make_config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_ext.errors import ModelError, UnsupportedModelError
from specdec_ext.models.rope import max_position, rope_tables

THETA = {"rope_theta": 10000.0}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", **THETA},
    "linear": {"rope_type": "linear", "factor": 3.0, **THETA},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0, **THETA},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32, **THETA,
    },
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **THETA,
    },
    "yarn_with_mscale": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2, **THETA,
    },
    "longrope": {
        "rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 4.0, **THETA,
    },
    "longrope_with_attention_factor": {
        "rope_type": "longrope", "original_max_position_embeddings": 32, "attention_factor": 1.3,
        **THETA,
    },
    "yarn_with_factor": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64,
        "attention_factor": 0.9, **THETA,
    },
}  # fmt: skip


def llama(name: str, **overrides: Any) -> Any:
    parameters = dict(PARAMETERS[name])
    if parameters["rope_type"] == "longrope":
        count = overrides.get("head_dim", 16) // 2
        parameters["short_factor"] = [0.5 + 0.2 * i for i in range(count)]
        parameters["long_factor"] = [9.0] * count
    return make_config("llama", rope_parameters=parameters, **overrides)


def close(table: np.ndarray, expected: torch.Tensor) -> bool:
    """A frequency may differ by a unit in the last place, an angle then by as much of itself."""
    angles = np.arange(len(table), dtype=np.float64)[:, None]
    return bool((np.abs(table - expected.numpy()) <= 2.0**-22 * (1 + angles)).all())


def test_values_are_the_nearest_floats():
    cos, sin = rope_tables(llama("default", head_dim=24), 256)
    exponents = [np.float32(2 * i) / np.float32(24) for i in range(12)]
    frequencies = [np.float32(1) / np.float32(10000.0 ** float(e)) for e in exponents]
    for position in range(256):
        for i, frequency in enumerate(frequencies):
            angle = float(np.float32(position) * frequency)
            assert cos[position, i] == np.float32(math.cos(angle))
            assert sin[position, i] == np.float32(math.sin(angle))


@pytest.mark.parametrize("head_dim", [8, 24, 64, 128])
@pytest.mark.parametrize("name", sorted(set(PARAMETERS) - {"dynamic"}))
def test_equals_transformers(name, head_dim):
    config = llama(name, head_dim=head_dim)
    positions = max_position(config)
    cos, sin = rope_tables(config, positions)
    assert cos.dtype == np.float32 and cos.shape == (positions, head_dim // 2)
    module = LlamaRotaryEmbedding(config)
    x = torch.empty(0, dtype=torch.float32)
    whole = module(x, torch.arange(positions)[None])
    for table, expected in zip((cos, sin), whole, strict=True):
        assert close(table, expected[0, :, : head_dim // 2])
        assert close(table, expected[0, :, head_dim // 2 :])


def test_dynamic_row_is_that_of_the_position_decoded_alone():
    config = llama("dynamic", max_position_embeddings=40)
    assert max_position(config) == 120
    cos, sin = rope_tables(config, 120)
    x = torch.empty(0, dtype=torch.float32)
    # A fresh module each: transformers' remembers its longest sequence.
    alone = [LlamaRotaryEmbedding(config)(x, torch.tensor([[p]])) for p in range(120)]
    for table, which in ((cos, 0), (sin, 1)):
        assert close(table, torch.stack([row[which][0, 0, :8] for row in alone]))
    assert np.array_equal(rope_tables(config, 30)[0], cos[:30])
    # Beyond the original length the rows do change with the length.
    assert np.abs(cos[100] - rope_tables(llama("default"), 120)[0][100]).max() > 0.01
    assert np.array_equal(cos[:40], rope_tables(llama("default"), 120)[0][:40])


def test_gemma3_has_a_table_per_layer_type():
    config = make_config(
        "gemma3",
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    )
    module = Gemma3RotaryEmbedding(config)
    x = torch.empty(0, dtype=torch.float32)
    for kind in ("sliding_attention", "full_attention"):
        expected = module(x, torch.arange(256)[None], kind)
        for table, value in zip(rope_tables(config, 256, kind), expected, strict=True):
            assert close(table, value[0, :, : table.shape[1]])
    assert max_position(config) == 256  # its configurations state the extended length


@pytest.mark.parametrize(
    ("name", "stated", "expected"),
    [("default", 256, 256), ("linear", 256, 768), ("dynamic", 256, 768), ("llama3", 256, 256),
     ("yarn", 64, 256), ("yarn", 256, 256), ("yarn_with_factor", 64, 128), ("longrope", 256, 64),
     ("longrope", 32, 32)],
)  # fmt: skip
def test_max_position(name, stated, expected):
    assert max_position(llama(name, max_position_embeddings=stated)) == expected


def test_unknown_type_and_missing_length():
    config = llama("default")
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4}
    with pytest.raises(UnsupportedModelError, match="rope_type = 'spiral'"):
        rope_tables(config, 8)
    with pytest.raises(ModelError, match="does not state its context length"):
        max_position(make_config("bloom"))
