"""Which checkpoints the native decoder runs, and how it has to run them.

A family is native when every configuration field that its transformers class reads is understood
here; a field that is new or set to something else sends the model to the adapter, with the reason.
Weight names and shapes follow the `state_dict` of transformers; what a family keeps in one
matrix has the names of its parts (fused_rows.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .config_reader import ModelConfig
from .family_config import FamilyConfig
from .rope import ROPE_TYPES, rope_parameters, rotary_dim

__all__ = ["ARCHITECTURES", "NATIVE_FAMILIES", "NativeShape", "NotNativeError", "native_shape"]


class NotNativeError(Exception):
    """The reason why the native decoder does not run a model. Never leaves this package."""


@dataclass(frozen=True)
class NativeShape:
    """Everything the decoder needs besides the weights. Lists have one entry per layer.

    rope_layer_types  one entry per rotary table: the layer type it serves, None for all
    rope_index        which table a layer uses, -1 for a layer without rotary positions
    sliding_window    tokens, 0 for none
    sink_tokens       that layers with a window see of a text's start, too
    norm_offset       added to every norm weight: Gemma stores w for a factor of 1 + w
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: str
    attention_scale: float
    attention_softcap: float
    final_softcap: float
    scales_embedding: bool
    norm_offset: float
    has_qk_norm: bool
    has_sandwich_norms: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    rope_layer_types: tuple[str | None, ...]
    rope_index: tuple[int, ...]
    sliding_window: tuple[int, ...]
    sink_tokens: int = 0

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor the checkpoint must hold."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q_width, hidden),
            "self_attn.k_proj.weight": (kv_width, hidden),
            "self_attn.v_proj.weight": (kv_width, hidden),
            "self_attn.o_proj.weight": (hidden, q_width),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
        }
        if self.qkv_bias:
            layer["self_attn.q_proj.bias"] = (q_width,)
            layer["self_attn.k_proj.bias"] = (kv_width,)
            layer["self_attn.v_proj.bias"] = (kv_width,)
        if self.o_bias:
            layer["self_attn.o_proj.bias"] = (hidden,)
        if self.mlp_bias:
            layer["mlp.gate_proj.bias"] = (ffn,)
            layer["mlp.up_proj.bias"] = (ffn,)
            layer["mlp.down_proj.bias"] = (hidden,)
        if self.has_qk_norm:
            layer["self_attn.q_norm.weight"] = (self.head_dim,)
            layer["self_attn.k_norm.weight"] = (self.head_dim,)
        if self.has_sandwich_norms:
            layer["pre_feedforward_layernorm.weight"] = (hidden,)
            layer["post_feedforward_layernorm.weight"] = (hidden,)
        expected: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden)
        }
        for index in range(self.num_layers):
            expected |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        expected["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            expected["lm_head.weight"] = (self.vocab_size, hidden)
        return expected


# Fields that change nothing for inference of the text decoder.
_NEUTRAL = frozenset((
    "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder", "label2id",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp",
    "problem_type", "return_dict", "transformers_version", "use_cache", "_name_or_path",
    "name_or_path",
))  # fmt: skip
# Fields that every family here reads, handled below.
_COMMON = frozenset((
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
    "layer_types", "sliding_window",
))  # fmt: skip
_FAMILY_FIELDS = {
    "llama": "attention_bias mlp_bias",
    "mistral": "",
    "qwen2": "use_sliding_window max_window_layers",
    "qwen3": "attention_bias use_sliding_window max_window_layers",
    "smollm3": "attention_bias mlp_bias use_sliding_window no_rope_layers no_rope_layer_interval",
    "phi3": "original_max_position_embeddings resid_pdrop embd_pdrop",
    "gemma2": "attention_bias hidden_activation query_pre_attn_scalar attn_logit_softcapping "
    "final_logit_softcapping",
    "gemma3_text": "attention_bias hidden_activation query_pre_attn_scalar "
    "attn_logit_softcapping final_logit_softcapping",
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
NATIVE_FAMILIES = tuple(_FAMILY_FIELDS)
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def native_shape(config: ModelConfig) -> NativeShape:
    """The native decoder's view of a configuration; NotNativeError with the reason otherwise."""
    hf, family = config.hf, config.model_type
    if family not in _FAMILY_FIELDS:
        raise NotNativeError(
            f"model_type {family!r} is not one of the native families {', '.join(NATIVE_FAMILIES)}"
        )
    if config.architecture and config.architecture != ARCHITECTURES[family]:
        raise NotNativeError(f"architecture {config.architecture} has its own model class")
    _check_fields_known(hf, family)
    if config.head_dim % 8 or config.head_dim > 256:
        raise NotNativeError(f"head_dim {config.head_dim} is not a multiple of 8 up to 256")
    is_gemma = family in ("gemma2", "gemma3_text")
    name = hf.hidden_activation if is_gemma else hf.hidden_act
    if name not in _ACTIVATIONS:
        raise NotNativeError(f"activation {name!r} is not one of {', '.join(sorted(_ACTIVATIONS))}")
    if getattr(hf, "use_bidirectional_attention", False):
        raise NotNativeError("use_bidirectional_attention: the decoder's attention is causal")
    attention_bias = bool(getattr(hf, "attention_bias", False))
    scale_base = hf.query_pre_attn_scalar if is_gemma else config.head_dim
    layer_types = _layer_types(config)
    rope_types, rope_index = _rope_layout(config, layer_types)
    return NativeShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=int(hf.intermediate_size),
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=float(hf.rms_norm_eps),
        activation=_ACTIVATIONS[name],
        attention_scale=float(scale_base) ** -0.5,
        # Gemma3's class has the field but does not read it.
        attention_softcap=float(hf.attn_logit_softcapping or 0.0) if family == "gemma2" else 0.0,
        final_softcap=float(hf.final_logit_softcapping or 0.0) if is_gemma else 0.0,
        scales_embedding=is_gemma,
        norm_offset=1.0 if is_gemma else 0.0,
        has_qk_norm=family in ("qwen3", "gemma3_text"),
        has_sandwich_norms=is_gemma,
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        tie_word_embeddings=config.tie_word_embeddings,
        rope_layer_types=rope_types,
        rope_index=rope_index,
        sliding_window=_sliding_windows(config, layer_types),
    )


def _check_fields_known(hf: Any, family: str) -> None:
    """A field this file does not know, set to anything but its default, may change the model."""
    if isinstance(hf, FamilyConfig):
        return  # has no other
    known = _NEUTRAL | _COMMON | frozenset(_FAMILY_FIELDS[family].split())
    for field in dataclasses.fields(hf):
        if field.name in known or field.name == "use_bidirectional_attention":
            continue
        default = field.default
        if default is dataclasses.MISSING:
            factory = field.default_factory
            default = None if factory is dataclasses.MISSING else factory()
        value = getattr(hf, field.name, default)
        if value != default and value not in (None, False):
            raise NotNativeError(f"config field {field.name} = {value!r} is not understood")


def _layer_types(config: ModelConfig) -> tuple[str, ...]:
    types = getattr(config.hf, "layer_types", None)
    if types is None:
        return ("full_attention",) * config.num_layers
    for kind in types:
        if kind not in _LAYER_TYPES:
            raise NotNativeError(f"layer type {kind!r} is not one of {', '.join(_LAYER_TYPES)}")
    if len(types) != config.num_layers:
        raise NotNativeError(f"layer_types has {len(types)} entries for {config.num_layers} layers")
    return tuple(types)


def _sliding_windows(config: ModelConfig, layer_types: tuple[str, ...]) -> tuple[int, ...]:
    window = int(getattr(config.hf, "sliding_window", None) or 0)
    if config.model_type == "llama":
        return (0,) * config.num_layers  # the class has no window, whatever the file says
    if config.model_type in ("mistral", "phi3"):
        return (window,) * config.num_layers  # all layers, layer_types or not
    if config.model_type == "smollm3" and not config.hf.use_sliding_window:
        return (0,) * config.num_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)


def _rope_layout(
    config: ModelConfig, layer_types: tuple[str, ...]
) -> tuple[tuple[str | None, ...], tuple[int, ...]]:
    """(the layer type of each rotary table, the table of each layer)."""
    hf = config.hf
    tables: tuple[str | None, ...] = (None,)
    index = (0,) * config.num_layers
    if config.model_type == "gemma3_text":
        tables = tuple(dict.fromkeys(layer_types))
        index = tuple(tables.index(kind) for kind in layer_types)
    if config.model_type == "smollm3":
        index = tuple(0 if has_rope else -1 for has_rope in hf.no_rope_layers)
    for kind in tables:
        parameters = rope_parameters(hf, kind)
        rope_type = parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise NotNativeError(f"rope_type {rope_type!r} is not one of {', '.join(ROPE_TYPES)}")
        if rope_type == "longrope" and kind is not None:
            raise NotNativeError("rope_type 'longrope' of one layer type")
        rotary, heads = rotary_dim(hf, kind), config.head_dim
        # Rows of whole heads are rotated: fused_rows.py puts those of one family in place.
        if rotary != heads and (
            config.model_type != "phi3" or rotary % 2 or not 0 < rotary < heads
        ):
            share = parameters["partial_rotary_factor"]
            raise NotNativeError(f"partial_rotary_factor {share}: {rotary} of {heads} elements")
    return tables, index
