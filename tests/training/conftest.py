"""A tiny target with a byte-level tokenizer, and its own texts as training data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from workshop import Workshop, sentences

from specdec_ext.training.collect import collect
from specdec_ext.training.data import TrainingData
from specdec_ext.training.texts import Task
from tiny_models import save_tiny


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose text falls into loops: something that heads can learn in seconds."""
    return save_tiny(
        tmp_path_factory.mktemp("target"), num_hidden_layers=3, tie_word_embeddings=True
    )


@pytest.fixture(scope="session")
def workshop(target: Path) -> Workshop:
    return Workshop(target)


@pytest.fixture(scope="session")
def tasks(workshop: Workshop) -> list[Task]:
    return workshop.tasks()


@pytest.fixture(scope="session")
def cache_dir(
    workshop: Workshop, tasks: list[Task], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder: Path = tmp_path_factory.mktemp("cache")
    collect(workshop.collector(folder, tasks))
    return folder


@pytest.fixture
def data(workshop: Workshop, cache_dir: Path, tasks: list[Task]) -> TrainingData:
    return TrainingData(workshop.reader(cache_dir, tasks), draft_vocab_size=200)


@pytest.fixture(scope="session")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 conversations as JSON lines."""
    path = tmp_path_factory.mktemp("messages") / "mine.jsonl"
    pairs = zip(sentences(1, 60, 4), sentences(2, 60, 7), strict=True)
    lines = (
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in pairs
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
