"""What a GGUF file's metadata say of its model, in the words of a config.json.

An entry of the architecture that is not understood here is refused by its name: it may change what
the model computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ModelError, UnsupportedModelError
from ..gguf import GgufFile

__all__ = ["GgufArchitecture", "architecture_of", "gguf_config"]

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_SANDWICH = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"
# What phi3 has for texts up to the original length, and for longer ones.
LENGTH_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


@dataclass(frozen=True)
class GgufArchitecture:
    """How the tensors of a `general.architecture` become those of a transformers model.

    layer             tensor of a block -> module of a layer
    permutes          rows of q and k are in llama.cpp's rotary order: pairs side by side
    norm_shift        what the file added to the norms' weights
    """

    model_type: str
    class_name: str
    layer: dict[str, str] = field(default_factory=lambda: dict(_LAYER))
    permutes: bool = False
    norm_shift: float = 0.0


_ARCHITECTURES = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM", permutes=True),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM", {**_LAYER, **_QK_NORMS}),
    "phi3": GgufArchitecture(
        "phi3",
        "Phi3ForCausalLM",
        {part: _LAYER[part] for part in ("attn_norm", "attn_output", "ffn_norm", "ffn_down")}
        | _FUSED,
    ),
    "gemma3": GgufArchitecture(
        "gemma3_text", "Gemma3ForCausalLM", {**_LAYER, **_QK_NORMS, **_SANDWICH}, norm_shift=1.0
    ),
}
# Entries of an architecture that are read below, and those that change nothing.
_KNOWN = frozenset((
    "vocab_size", "context_length", "embedding_length", "feed_forward_length", "block_count",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_count",
    "expert_used_count",
))  # fmt: skip
_LOCAL_BASE = "rope.freq_base_swa"  # of gemma3, whose layers with windows have a base of their own
# Those of one architecture alone.
_OWN = {"phi3": frozenset(("rope.scaling.attn_factor",)), "gemma3_text": frozenset((_LOCAL_BASE,))}


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """Raises UnsupportedModelError for one that the native decoder does not run."""
    name = file.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: general.architecture = {name!r}: supported are "
            f"{', '.join(_ARCHITECTURES)}; give the model as a Hugging Face folder"
        )
    return _ARCHITECTURES[name]


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The config.json of the model in `file`. Raises ModelError, UnsupportedModelError."""
    architecture = architecture_of(file)
    prefix = file.text("general.architecture") + "."
    is_phi3 = architecture.model_type == "phi3"
    _refuse_unknown(file, prefix, _KNOWN | _OWN.get(architecture.model_type, frozenset()))

    def whole(key: str, high: int, default: int | None = None) -> int:
        return file.whole(prefix + key, 1, high, default)

    hidden, heads = whole("embedding_length", 1 << 20), whole("attention.head_count", 1 << 16)
    head_dim = whole("attention.key_length", 1 << 14, max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if is_phi3 and key == "rope.dimension_count":
            continue  # it may be less
        if (other := whole(key, 1 << 14, head_dim)) != head_dim:
            raise UnsupportedModelError(
                f"{file.path}: {prefix}{key} = {other}: heads of {head_dim} need the same here"
            )
    embedding = file.tensors.get("token_embd.weight")
    epsilon = file.number(prefix + "attention.layer_norm_rms_epsilon", 1e-12, 1.0)
    theta = float(file.number(prefix + "rope.freq_base", 1e-3, 1e12, 10000.0))
    context = whole("context_length", 1 << 26)
    ends = [file.token_id(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    eos = [token for token in dict.fromkeys(ends) if token is not None]
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "vocab_size": embedding.shape[0] if embedding else whole("vocab_size", 1 << 24),
        "hidden_size": hidden,
        "intermediate_size": whole("feed_forward_length", 1 << 22),
        "num_hidden_layers": whole("block_count", 4096),
        "num_attention_heads": heads,
        "num_key_value_heads": whole("attention.head_count_kv", 1 << 16, heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": float(epsilon),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, prefix, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.token_id("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos if len(eos) > 1 else next(iter(eos), None),
        "pad_token_id": file.token_id("tokenizer.ggml.padding_token_id"),
        "dtype": _dtype(file),
    }
    window = file.whole(prefix + "attention.sliding_window", 0, 1 << 26, 0)
    if architecture.model_type == "gemma3_text":
        local = file.number(prefix + _LOCAL_BASE, 1e-3, 1e12, 10000.0)
        config |= _gemma3(config, window, float(local))
    elif is_phi3:
        config |= _phi3(file, prefix, head_dim, context)
        config["sliding_window"] = window or None  # of all layers; 0 is none
    elif window and architecture.model_type == "llama":  # Mistral's files are of this architecture
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        config["sliding_window"] = window
    elif window:
        raise UnsupportedModelError(
            f"{file.path}: {prefix}attention.sliding_window = {window}: which layers have it is "
            "not in the file; give the model as a Hugging Face folder"
        )
    if architecture.model_type == "qwen3":
        config["attention_bias"] = False
    if architecture.model_type == "llama" and config["model_type"] == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return config


def _refuse_unknown(file: GgufFile, prefix: str, known: frozenset[str]) -> None:
    for key in file:
        if key.startswith(prefix) and key.removeprefix(prefix) not in known:
            raise UnsupportedModelError(
                f"{file.path}: {key} = {str(file.get(key))[:80]}: not understood by the native "
                "decoder; give the model as a Hugging Face folder"
            )
    experts = file.whole(prefix + "expert_count", 0, 1 << 16, 0)
    if experts:
        raise UnsupportedModelError(
            f"{file.path}: {prefix}expert_count = {experts}: mixtures of experts run from Hugging "
            "Face folders alone"
        )


def _gemma3(config: dict[str, Any], window: int, local_base: float) -> dict[str, Any]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    # 27B scales queries by its hidden size; no entry says so, its number of layers does.
    scale = hidden // heads if config["num_hidden_layers"] == 62 else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale,
        "rope_local_base_freq": local_base,
        "sliding_window": window or 512,
        "sliding_window_pattern": 6,
    }


def _phi3(file: GgufFile, prefix: str, head_dim: int, context: int) -> dict[str, Any]:
    """What it says of its rotary positions alone."""
    rotary = int(file.number(prefix + "rope.dimension_count", 1, head_dim, head_dim))
    share = rotary / head_dim
    if int(head_dim * share) < rotary:  # as transformers takes it back
        share = math.nextafter(share, 1.0)
    original = prefix + "rope.scaling.original_context_length"
    config: dict[str, Any] = {
        "partial_rotary_factor": share,
        "original_max_position_embeddings": int(file.number(original, 1, 1 << 26, context)),
    }
    short, long = (_length_factors(file, name, rotary // 2) for name in LENGTH_FACTORS)
    if short is None and long is None:
        return config
    scaling: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    factor = prefix + "rope.scaling.attn_factor"
    if file.get(factor) is not None:
        scaling["attention_factor"] = float(file.number(factor, 1e-3, 1e3))
    return config | {"rope_scaling": scaling}


def _length_factors(file: GgufFile, name: str, count: int) -> list[float] | None:
    tensor = file.tensors.get(name)
    others = [other for other in LENGTH_FACTORS if other in file.tensors]
    if tensor is None and not others:
        return None
    found = "missing" if tensor is None else f"{tensor.format} {list(tensor.shape)}"
    if tensor is None or tensor.format != "float32" or tensor.shape != (count,):
        raise UnsupportedModelError(
            f"{file.path}: tensor {name!r} is {found}, expected float32 [{count}]: a factor for "
            "each frequency; copy or convert the file again"
        )
    factors = file.data(tensor)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError(
            f"{file.path}: tensor {name!r} holds factors that are no positive numbers; the file is "
            "damaged"
        )
    return [float(factor) for factor in factors]


def _rope_scaling(
    file: GgufFile, prefix: str, theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = file.text(prefix + "rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, theta, head_dim)
    if kind == "none":
        return None
    scaling = {
        "rope_type": kind,
        "factor": float(file.number(prefix + "rope.scaling.factor", 1e-3, 1e6)),
    }
    if kind == "yarn":
        original = prefix + "rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = file.whole(original, 1, 1 << 26)
    elif kind != "linear":
        raise UnsupportedModelError(
            f"{file.path}: {prefix}rope.scaling.type = {kind!r}: supported are none, linear, yarn"
        )
    return scaling


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1 and later: the file has the factor of each frequency and not the rule. The rule's
    other numbers are those of every published model; the factor of the lowest one is its factor."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.format != "float32" or tensor.shape != (head_dim // 2,):
        raise UnsupportedModelError(
            f"{file.path}: tensor {ROPE_FACTORS!r} is {tensor.format} {list(tensor.shape)}, "
            f"expected float32 [{head_dim // 2}]"
        )
    factors = file.data(tensor).astype(np.float64)
    factor, low, high, original = float(factors[-1]), 1.0, 4.0, 8192
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"{file.path}: tensor {ROPE_FACTORS!r}: frequencies are scaled by a rule that is not "
            "that of Llama 3; give the model as a Hugging Face folder"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _dtype(file: GgufFile) -> str:
    """The type of K and V, and of weights taken out of their blocks: the float type that holds most
    matrices, bfloat16 where these are blocks."""
    size: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            name = "bfloat16" if tensor.is_quantised else tensor.format
            size[name] = size.get(name, 0) + tensor.nbytes
    return max(size, key=lambda name: size[name], default="float32")
