"""A tiny target with a byte-level tokenizer, and its own texts as training data."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec_ext.training.cache import CacheReader
from specdec_ext.training.collect import CollectConfig, collect
from specdec_ext.training.data import TrainingData
from tiny_models import save_tiny

TINY = CollectConfig(num_prompts=72, max_new_tokens=40, max_prompt_len=24, shard_size=16)
VOCAB = 258


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose text falls into loops: something that heads can learn in seconds."""
    return save_tiny(
        tmp_path_factory.mktemp("target"), num_hidden_layers=3, tie_word_embeddings=True
    )


@pytest.fixture(scope="session")
def cache_dir(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("cache")
    collect(target, folder, TINY, batch_size=8)
    return folder


@pytest.fixture(scope="session")
def data(cache_dir: Path) -> TrainingData:
    return TrainingData(CacheReader(cache_dir), draft_vocab_size=200)
