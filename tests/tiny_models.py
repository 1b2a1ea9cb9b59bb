"""Tiny random Llamas, saved as folders: bare ones, and with a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def save_llama(path: Path, seed: int, vocab_size: int, **overrides: Any) -> Path:
    """A random Llama whose greedy text is varied, yet repeats itself as text does; no end token."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    LlamaForCausalLM(LlamaConfig(**{**values, **overrides})).save_pretrained(path)
    return path


def save_tiny(
    path: Path,
    *,
    seed: int = 5,
    extra: tuple[str, ...] = (),
    backwards: bool = False,
    **overrides: Any,
) -> Path:
    """A model whose greedy text falls into loops; `extra` are special tokens of its own.

    backwards  the ids of the bytes are in descending order: another vocabulary
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=backwards)
    vocab = {c: i for i, c in enumerate(letters)}
    core = Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>", *extra])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.save_pretrained(path)
    return save_llama(path, seed, len(tokenizer), eos_token_id=tokenizer.eos_token_id, **overrides)


def as_phi3(folder: Path, **changes: Any) -> Path:
    """A Llama folder turned into one of the family phi3, whose projections lie in two matrices: the
    same model. changes: of config.json."""
    stacks = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "gate_proj.weight"))]:
        layer, _, last = name.rpartition(".")[0].rpartition(".")
        whole = "qkv" if last == "q_proj" else "gate_up"
        parts = [tensors.pop(f"{layer}.{part}_proj.weight") for part in stacks[whole]]
        tensors[f"{layer}.{whole}_proj.weight"] = torch.cat(parts)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in ("attention_bias", "mlp_bias", "pretraining_tp"):
        config.pop(key, None)
    config |= {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], **changes}
    path.write_text(json.dumps(config))
    return folder
