"""Tiny random models of many families, saved as Hugging Face folders.

Weights are drawn wide (standard deviation 0.2), so that greedy text is varied and a wrong scale,
window or norm changes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf

VOCAB = 199  # prime, and no multiple of a vector width

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_MOE = {"num_experts_per_tok": 2, "head_dim": 16}


@dataclass(frozen=True)
class Family:
    """A configuration class and what it needs besides (or, when `bare`, instead of) _COMMON."""

    config: Any
    extra: dict[str, Any]
    bare: bool = False


# Every family here is run by the native decoder.
NATIVE = {
    "llama": Family(hf.LlamaConfig, {}),
    "llama_tied": Family(hf.LlamaConfig, {"tie_word_embeddings": True}),
    "llama_biased": Family(hf.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_mha": Family(hf.LlamaConfig, {"num_key_value_heads": 4}),
    # The narrowest heads that a device has tensor-core attention for.
    "llama_head_64": Family(
        hf.LlamaConfig, {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    ),
    "llama_mqa_wide_head": Family(hf.LlamaConfig, {"num_key_value_heads": 1, "head_dim": 40}),
    "mistral": Family(hf.MistralConfig, {"sliding_window": None}),
    "mistral_window": Family(hf.MistralConfig, {"sliding_window": 7}),
    "qwen2": Family(hf.Qwen2Config, {}),
    "qwen2_window": Family(
        hf.Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "qwen3": Family(hf.Qwen3Config, {"head_dim": 24}),
    "qwen3_biased": Family(hf.Qwen3Config, {"head_dim": 24, "attention_bias": True}),
    "gemma2": Family(
        hf.Gemma2Config,
        {"head_dim": 24, "sliding_window": 6, "query_pre_attn_scalar": 20,
         "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0,
         "tie_word_embeddings": True},
    ),
    "gemma3": Family(
        hf.Gemma3TextConfig,
        {"head_dim": 24, "sliding_window": 6, "query_pre_attn_scalar": 20, "num_hidden_layers": 4,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention",
                         "sliding_attention"], "tie_word_embeddings": True},
    ),
    "smollm3": Family(hf.SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
    "phi3": Family(hf.Phi3Config, {}),
    "phi3_window": Family(hf.Phi3Config, {"sliding_window": 7, "num_key_value_heads": 4}),
}  # fmt: skip

# Families of the adapter alone. `exact`: the adapter keeps their rows independent of each other.
ADAPTED = {
    "gpt_neox": Family(hf.GPTNeoXConfig, {}),
    "starcoder2": Family(hf.Starcoder2Config, {"sliding_window": 6}),
    "opt": Family(
        hf.OPTConfig,
        {"vocab_size": VOCAB, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3,
         "num_attention_heads": 4, "max_position_embeddings": 256, "word_embed_proj_dim": 64,
         **_SPECIAL},
        bare=True,
    ),
    "gpt2": Family(
        hf.GPT2Config,
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256,
         "bos_token_id": 1, "eos_token_id": 2},
        bare=True,
    ),
    "olmo2": Family(hf.Olmo2Config, {}),
    "cohere": Family(hf.CohereConfig, {"logit_scale": 0.5}),
    "cohere2": Family(hf.Cohere2Config, {"sliding_window": 6, "num_hidden_layers": 4}),
    "granite": Family(
        hf.GraniteConfig,
        {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.7,
         "embedding_multiplier": 1.5},
    ),
    "stablelm": Family(hf.StableLmConfig, {}),
    "gpt_oss": Family(
        hf.GptOssConfig,
        {**_MOE, "num_local_experts": 4, "sliding_window": 6,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "qwen3_moe": Family(
        hf.Qwen3MoeConfig, {**_MOE, "num_experts": 4, "moe_intermediate_size": 32}
    ),
}  # fmt: skip

# Families that must be refused, and a word of the reason.
REFUSED = {
    "bloom": Family(
        hf.BloomConfig,
        {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1,
         "eos_token_id": 2},
        bare=True,
    ),
    "falcon": Family(
        hf.FalconConfig,
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "bos_token_id": 1, "eos_token_id": 2},
        bare=True,
    ),
    "gptj": Family(
        hf.GPTJConfig,
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8,
         "n_positions": 128, "bos_token_id": 1, "eos_token_id": 2},
        bare=True,
    ),
    "mamba": Family(
        hf.MambaConfig, {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}, bare=True
    ),
    "t5": Family(
        hf.T5Config,
        {"vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2,
         "num_heads": 4},
        bare=True,
    ),
    "bert": Family(hf.BertConfig, {"num_key_value_heads": 4}),
}  # fmt: skip

FAMILIES = {**NATIVE, **ADAPTED, **REFUSED}


def make_config(family: str, **overrides: Any) -> Any:
    entry = FAMILIES[family]
    values = dict(entry.extra) if entry.bare else {**_COMMON, **entry.extra}
    return entry.config(**{**values, **overrides})


def make_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 model in evaluation mode."""
    torch.manual_seed(seed)
    config = make_config(family, **overrides)
    build = hf.AutoModelForSeq2SeqLM if family == "t5" else hf.AutoModelForCausalLM
    # transformers 5.17 chose torch's attention for it, which caps no scores.
    attention = {"attn_implementation": "eager"} if family == "gemma2" else {}
    model = build.from_config(config, dtype=torch.float32, **attention)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sinks" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
        elif "norm" in name:  # not all ones, so that a norm that is left out or misplaced shows
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


def save_model(model: Any, folder: Path, dtype: torch.dtype = torch.float32, **save: Any) -> Path:
    """Save in the v5 format; weights rounded to `dtype`."""
    model.to(dtype).save_pretrained(folder, **save)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content))


def to_v4_keys(folder: Path) -> None:
    """Rewrite config.json as transformers 4 wrote it."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["torch_dtype"] = content.pop("dtype")
    rope = content.pop("rope_parameters")
    if "full_attention" in rope:  # one dictionary per layer type: Gemma3
        content["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    content["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] == "default":
        rope = None
    else:
        rope["type"] = rope.pop("rope_type")
    content["rope_scaling"] = rope
    for key in ("layer_types", "head_dim"):  # v4 files of most families have neither
        if content.get("model_type") in ("llama", "mistral", "qwen2"):
            content.pop(key, None)
    path.write_text(json.dumps(content))
