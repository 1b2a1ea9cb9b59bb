"""Tiny random Llamas with a byte-level tokenizer, saved as folders."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def save_tiny(path: Path, *, seed: int = 5, layers: int = 2, extra: tuple[str, ...] = ()) -> Path:
    """A model whose greedy text falls into loops; `extra` are special tokens of its own."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>", *extra])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.save_pretrained(path)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=None,
        initializer_range=0.3, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path
