"""Weights of the Llama shape as torch tensors on one device, fused for few and large products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch

from .. import ops
from .config_reader import ModelConfig
from .device_blocks import Loaded, Matrix, Rows, as_floats, as_matrix, as_rows, parts_of, some_rows
from .native_config import NativeShape
from .rope import rope_tables
from .shard import Shard

__all__ = ["DeviceLayer", "DeviceWeights", "load_weights", "random_weights"]

Load = Callable[[str], Loaded]


@dataclass(frozen=True)
class DeviceLayer:
    """One layer. Matrices are [outputs, inputs] as checkpoints store them, packed or of the model's
    dtype.

    qkv      [(H + 2 G) K, hidden]: rows of q, then k, then v
    gate_up  [2 intermediate, hidden]: rows of the gate, then of the other factor
    """

    input_norm: torch.Tensor
    qkv: Rows
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Matrix
    o_bias: torch.Tensor | None
    attention_out_norm: torch.Tensor | None  # of what attention adds, sandwich norms only
    ffn_norm: torch.Tensor
    gate_up: Rows
    gate_up_bias: torch.Tensor | None
    down: Matrix
    down_bias: torch.Tensor | None
    ffn_out_norm: torch.Tensor | None  # of what the feed-forward block adds, sandwich norms only

    def tensors(self) -> Iterator[Matrix]:
        values = (getattr(self, field.name) for field in fields(self))
        return (part for value in values if value is not None for part in parts_of(value))


@dataclass(frozen=True)
class DeviceWeights:
    """head is the embedding itself where they are tied, or its packed form: an embedding is always
    of the model's dtype, as a step reads few of its rows. rope: (cos, sin) float32 by table.

    Of one of several ranks: its rows; rank 0 has the embedding, the others [0, hidden], and the
    whole head, for drafters. own_head: the rows that a step's scores are computed from."""

    embedding: torch.Tensor
    layers: list[DeviceLayer]
    final_norm: torch.Tensor
    head: Matrix
    own_head: Matrix
    rope: list[tuple[torch.Tensor, torch.Tensor]]

    def step_bytes(self) -> int:
        """Bytes that a step reads: everything but the embedding's rows that it skips."""
        layers = (t for layer in self.layers for t in layer.tensors())
        read = [self.final_norm, self.own_head, *layers]
        return sum(t.nbytes for t in read)

    def packed_formats(self) -> set[str]:
        """Formats of the matrices that are no floats."""
        one = [self.own_head, *(t for layer in self.layers for t in layer.tensors())]
        return {t.format for t in one if isinstance(t, ops.PackedWeight)}


def load_weights(
    config: ModelConfig,
    shape: NativeShape,
    load: Load,
    *,
    device: torch.device,
    dtype: torch.dtype,
    positions: int,
    head_ids: torch.Tensor | None = None,
    shard: Shard | None = None,
    layer_was_read: Callable[[], None] = lambda: None,
) -> DeviceWeights:
    """The checkpoint's tensors, one after another: never all of them twice.

    load       gives a tensor by its name in the checkpoint: floats, or blocks and their format,
               which stay so where a device has a kernel for it (device_blocks.py)
    positions  rows of the rotary tables
    head_ids   the tokens that a tied head scores, in this order; None: all
    shard      the part that `load` gives, of one of several ranks; None: the whole
    layer_was_read  is called after each layer
    """

    def floats(name: str) -> torch.Tensor:
        return as_floats(load(name), device, dtype)

    def matrix(name: str) -> Matrix:
        return as_matrix(load(f"{name}.weight"), device, dtype)

    def rows(prefix: str, *names: str) -> Rows:
        return as_rows([load(f"{prefix}{name}.weight") for name in names], device, dtype)

    def biases(prefix: str, *names: str) -> torch.Tensor:
        return torch.cat([floats(f"{prefix}{name}.bias") for name in names])

    def layer(index: int) -> DeviceLayer:
        prefix = f"model.layers.{index}."

        def get(name: str) -> torch.Tensor:
            return floats(prefix + name)

        def bias(name: str, is_there: bool) -> torch.Tensor | None:
            held = shard is None or shard.holds(prefix + name)
            return get(name) if is_there and held else None

        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        sandwich = shape.has_sandwich_norms
        second = "post_attention_layernorm.weight"
        found = DeviceLayer(
            input_norm=get("input_layernorm.weight"),
            qkv=rows(attention, "q_proj", "k_proj", "v_proj"),
            qkv_bias=biases(attention, "q_proj", "k_proj", "v_proj") if shape.qkv_bias else None,
            q_norm=get("self_attn.q_norm.weight") if shape.has_qk_norm else None,
            k_norm=get("self_attn.k_norm.weight") if shape.has_qk_norm else None,
            o=matrix(f"{attention}o_proj"),
            o_bias=bias("self_attn.o_proj.bias", shape.o_bias),
            attention_out_norm=get(second) if sandwich else None,
            ffn_norm=get("pre_feedforward_layernorm.weight" if sandwich else second),
            gate_up=rows(mlp, "gate_proj", "up_proj"),
            gate_up_bias=biases(mlp, "gate_proj", "up_proj") if shape.mlp_bias else None,
            down=matrix(f"{mlp}down_proj"),
            down_bias=bias("mlp.down_proj.bias", shape.mlp_bias),
            ffn_out_norm=get("post_feedforward_layernorm.weight") if sandwich else None,
        )
        layer_was_read()
        return found

    embeds = shard is None or shard.rank == 0
    tied = shape.tie_word_embeddings
    table = load("model.embed_tokens.weight") if embeds or tied else None
    embedding = torch.empty(0, shape.hidden_size, dtype=dtype, device=device)
    if embeds:
        assert table is not None
        embedding = as_floats(table, device, dtype)
    scored = table if tied and table is not None else load("lm_head.weight")
    if head_ids is not None:
        scored = some_rows(scored, head_ids)
    head = as_matrix(scored, device, dtype)
    if embeds and scored is table and isinstance(head, torch.Tensor):
        head = embedding
    own_head = head
    if shard is not None and shard.rank == 0:
        own = shard.scores(0)
        if isinstance(head, torch.Tensor):
            own_head = head[own]
        else:  # packed rows lie in tiles: those are packed once more
            own_head = as_matrix(some_rows(scored, torch.arange(own.stop)), device, dtype)
    return DeviceWeights(
        embedding=embedding,
        layers=[layer(index) for index in range(shape.num_layers)],
        final_norm=floats("model.norm.weight"),
        head=head,
        own_head=own_head,
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
