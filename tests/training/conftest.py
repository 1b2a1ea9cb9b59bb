"""A tiny target with a byte-level tokenizer, and its own texts as training data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec_ext.training.cache import CacheReader
from specdec_ext.training.collect import CollectConfig, collect
from specdec_ext.training.data import TrainingData

TINY = CollectConfig(num_prompts=72, max_new_tokens=40, max_prompt_len=24, shard_size=16)
VOCAB = 258


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose text falls into loops: something that heads can learn in seconds."""
    path: Path = tmp_path_factory.mktemp("target")
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.save_pretrained(path)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=None,
        initializer_range=0.3, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def cache_dir(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("cache")
    collect(target, folder, TINY, batch_size=8)
    return folder


@pytest.fixture(scope="session")
def data(cache_dir: Path) -> TrainingData:
    return TrainingData(CacheReader(cache_dir), draft_vocab_size=200)
