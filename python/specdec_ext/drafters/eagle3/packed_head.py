"""An EAGLE-3 head on few-row linear layers, beside a target on the CPU."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ... import _core
from ...models.host_arrays import converted, from_torch, kv_dtype_name
from ...models.rope import rope_tables
from ..packed_layer import drafter_format, pack_layer
from .checkpoint import Eagle3Weights
from .shape import NUM_TAPS

__all__ = ["pack_head"]

_ATTENTION = "midlayer.self_attn."


def pack_head(
    weights: Eagle3Weights, target: Any, max_position: int, sliding_window: int = 0
) -> Any:
    """_core.Eagle3Head with rotary tables of so many positions; sliding_window: tokens that it
    sees, 0: all."""
    shape, tensors = weights.shape, weights.tensors
    dtype, format = str(kv_dtype_name(target)), drafter_format(target)

    def floats(name: str) -> Any:
        return np.ascontiguousarray(cast(Any, converted(tensors[name], "float32")))

    def pack(*names: str) -> Any:
        """Layers that read the same input are one, row under row."""
        bias = None
        if f"{names[0]}.bias" in tensors:
            bias = np.concatenate([floats(f"{name}.bias") for name in names])
        return pack_layer([tensors[f"{name}.weight"] for name in names], bias, dtype, format)

    cos, sin = rope_tables(shape.rope, max_position)
    embedding = getattr(target, "core", None)
    if weights.embedding is not None:
        embedding = _core.PackedLinear(converted(weights.embedding, dtype), None)
    elif embedding is None:  # the adapter's
        embedding = _core.PackedLinear(converted(from_torch(target.embed_table()), dtype), None)
    return _core.Eagle3Head(
        hidden_size=shape.hidden_size,
        tap_size=NUM_TAPS * shape.target_hidden_size,
        num_scores=shape.draft_vocab_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        norm_before_residual=shape.norm_before_residual,
        sliding_window=sliding_window,
        fc=pack("fc"),
        qkv=pack(*(f"{_ATTENTION}{name}_proj" for name in "qkv")),
        o=pack(_ATTENTION + "o_proj"),
        gate_up=pack("midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"),
        down=pack("midlayer.mlp.down_proj"),
        head=pack("lm_head"),
        input_norm=floats("midlayer.input_layernorm.weight"),
        feature_norm=floats("midlayer.hidden_norm.weight"),
        ffn_norm=floats("midlayer.post_attention_layernorm.weight"),
        final_norm=floats("norm.weight"),
        cos=cos,
        sin=sin,
        embedding=embedding,
    )
