"""Weights of the Llama shape as torch tensors on one device, fused for few and large products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch

from .config_reader import ModelConfig
from .native_config import NativeShape
from .rope import rope_tables

__all__ = ["DeviceLayer", "DeviceWeights", "load_weights", "random_weights"]

Load = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class DeviceLayer:
    """One layer. Matrices are [outputs, inputs] as checkpoints store them.

    qkv      [(H + 2 G) K, hidden]: rows of q, then k, then v
    gate_up  [2 intermediate, hidden]: rows of the gate, then of the other factor
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    attention_out_norm: torch.Tensor | None  # of what attention adds, sandwich norms only
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    ffn_out_norm: torch.Tensor | None  # of what the feed-forward block adds, sandwich norms only

    def tensors(self) -> Iterator[torch.Tensor]:
        values = (getattr(self, field.name) for field in fields(self))
        return (value for value in values if value is not None)


@dataclass(frozen=True)
class DeviceWeights:
    """head is the embedding itself where they are tied. rope: (cos, sin) float32 by table."""

    embedding: torch.Tensor
    layers: list[DeviceLayer]
    final_norm: torch.Tensor
    head: torch.Tensor
    rope: list[tuple[torch.Tensor, torch.Tensor]]

    def step_bytes(self) -> int:
        """Bytes that a step reads: everything but the embedding's rows that it skips."""
        read = [self.final_norm, self.head, *(t for layer in self.layers for t in layer.tensors())]
        return sum(t.numel() * t.element_size() for t in read)


def load_weights(
    config: ModelConfig,
    shape: NativeShape,
    load: Load,
    *,
    device: torch.device,
    dtype: torch.dtype,
    positions: int,
    head_ids: torch.Tensor | None = None,
) -> DeviceWeights:
    """The checkpoint's tensors, one after another: never all of them twice.

    load       gives a tensor by its name in the checkpoint
    positions  rows of the rotary tables
    head_ids   the tokens that a tied head scores, in this order; None: all
    """

    def fuse(prefix: str, names: tuple[str, ...], suffix: str) -> torch.Tensor:
        parts = [load(f"{prefix}{name}.{suffix}") for name in names]
        return torch.cat([part.to(device, dtype) for part in parts])

    def layer(index: int) -> DeviceLayer:
        prefix = f"model.layers.{index}."

        def get(name: str) -> torch.Tensor:
            return load(prefix + name).to(device, dtype).contiguous()

        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        sandwich = shape.has_sandwich_norms
        second = "post_attention_layernorm.weight"
        return DeviceLayer(
            input_norm=get("input_layernorm.weight"),
            qkv=fuse(attention, ("q_proj", "k_proj", "v_proj"), "weight"),
            qkv_bias=fuse(attention, ("q_proj", "k_proj", "v_proj"), "bias")
            if shape.qkv_bias
            else None,
            q_norm=get("self_attn.q_norm.weight") if shape.has_qk_norm else None,
            k_norm=get("self_attn.k_norm.weight") if shape.has_qk_norm else None,
            o=get("self_attn.o_proj.weight"),
            o_bias=get("self_attn.o_proj.bias") if shape.o_bias else None,
            attention_out_norm=get(second) if sandwich else None,
            ffn_norm=get("pre_feedforward_layernorm.weight" if sandwich else second),
            gate_up=fuse(mlp, ("gate_proj", "up_proj"), "weight"),
            gate_up_bias=fuse(mlp, ("gate_proj", "up_proj"), "bias") if shape.mlp_bias else None,
            down=get("mlp.down_proj.weight"),
            down_bias=get("mlp.down_proj.bias") if shape.mlp_bias else None,
            ffn_out_norm=get("post_feedforward_layernorm.weight") if sandwich else None,
        )

    embedding = load("model.embed_tokens.weight").to(device, dtype).contiguous()
    head = embedding
    if not shape.tie_word_embeddings:
        head = load("lm_head.weight").to(device, dtype).contiguous()
    if head_ids is not None:
        head = head[head_ids.to(device)]
    return DeviceWeights(
        embedding=embedding,
        layers=[layer(index) for index in range(shape.num_layers)],
        final_norm=load("model.norm.weight").to(device, dtype).contiguous(),
        head=head,
        rope=[
            (torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device))
            for cos, sin in (
                rope_tables(config.hf, positions, kind) for kind in shape.rope_layer_types
            )
        ],
    )


def random_weights(
    config: ModelConfig,
    shape: NativeShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    positions: int,
    seed: int = 0,
) -> DeviceWeights:
    """Random numbers of a checkpoint's shapes, made on the device: a model for measurements."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = shape.expected_weights()

    def load(name: str) -> torch.Tensor:
        size = shapes[name]
        if len(size) == 1 and name.endswith("norm.weight"):
            return torch.full(size, 1.0 - shape.norm_offset, dtype=dtype, device=device)
        values = torch.empty(size, dtype=dtype, device=device)
        return values.normal_(0.0, size[-1] ** -0.5, generator=generator)

    return load_weights(config, shape, load, device=device, dtype=dtype, positions=positions)
