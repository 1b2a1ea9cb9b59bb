"""Tiny random Llamas, saved as folders: bare ones, and with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
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
