"""A draft model whose head scores the tokens that are asked for: the whole head's columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_builder import Driver, Sequence
from safetensors.torch import load_file, save_file

from emulators import devices
from gguf_files import write_gguf
from specdec_ext.errors import ModelError
from specdec_ext.models import load_model
from specdec_ext.models.draft_vocab import scored_rows
from specdec_ext.models.place import resolve_device
from tiny_models import save_llama

VOCAB = 100
WANTED = np.random.default_rng(2).permutation(VOCAB)[:37]
PROMPT = [3, 99, 41, 7, 7, 12]


def scores(path: Path, **options: Any) -> tuple[Any, torch.Tensor]:
    model = load_model(path, max_rows=64, draft=True, **options)
    [rows] = Driver(model).scores([(Sequence(), PROMPT)])
    return model, rows


def ids(model: Any) -> torch.Tensor:
    """Greedy columns of every row."""
    driver = Driver(model)
    plan = driver._plan([(Sequence(), PROMPT)], None, True, False)
    return torch.as_tensor(model.forward(plan)).clone()


def folder(root: Path, tied: bool, size: int = 32) -> Path:
    return save_llama(root / "model", 4, VOCAB, tie_word_embeddings=tied, hidden_size=size)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_are_the_columns_of_the_whole_head(
    tmp_path: Path, tied: bool, impl: str, dtype: str
) -> None:
    path = folder(tmp_path, tied)
    _, whole = scores(path, model_impl=impl, dtype=dtype)
    model, some = scores(path, model_impl=impl, dtype=dtype, head_ids=WANTED)
    assert torch.equal(some, whole[:, WANTED])
    assert model.num_scores == len(WANTED) and model.head_ids.tolist() == WANTED.tolist()
    assert ids(model).tolist() == some.argmax(1).tolist()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("format", ["q8_0", "q4_1", "bfloat16"])
def test_rows_of_blocks_are_kept_as_they_are(tmp_path: Path, tied: bool, format: str) -> None:
    path = folder(tmp_path, tied, 64)
    file = write_gguf(path, tmp_path / "m.gguf", format, tokenizer=False)
    _, whole = scores(file)
    model, some = scores(file, head_ids=WANTED)
    assert torch.equal(some, whole[:, WANTED])
    assert ids(model).tolist() == some.argmax(1).tolist()


@devices
@pytest.mark.parametrize("tied", [True, False])
def test_scores_on_a_device(tmp_path: Path, tied: bool, device: str) -> None:
    """torch's product of fewer columns may sum in another order."""
    path, place = folder(tmp_path, tied), resolve_device(device)
    _, whole = scores(path, place=place)
    model, some = scores(path, place=place, head_ids=WANTED)
    torch.testing.assert_close(some, whole[:, WANTED], rtol=1e-5, atol=1e-5)
    assert ids(model).tolist() == some.argmax(1).tolist()


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_some_tokens_gives_those_that_it_has(tmp_path: Path, tied: bool) -> None:
    """A file's own list, in the file's order, and what is asked for, in another."""
    path = folder(tmp_path, tied)
    _, whole = scores(path)
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:60]
    weights = load_file(path / "model.safetensors")
    if not tied:
        weights["lm_head.weight"] = weights["lm_head.weight"][kept].clone()
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    save_file({"token_ids": kept.int()}, path / "draft_vocab.safetensors")
    _, own = scores(path)
    assert torch.equal(own, whole[:, kept.sort().values])
    model, some = scores(path, head_ids=WANTED)
    left = [token for token in WANTED.tolist() if token in kept.tolist()]
    assert 5 < len(left) < len(WANTED) and model.head_ids.tolist() == left
    assert torch.equal(some, whole[:, left])


def test_nothing_left_to_score_is_refused() -> None:
    rows = scored_rows(Path("m"), 8, np.array([5, 1]), np.array([1, 2, 5]))
    assert rows is not None
    assert (rows.token_ids.tolist(), rows.places.tolist(), rows.file_rows) == ([1, 5], [1, 0], 2)
    assert scored_rows(Path("m"), 8, None, None) is None
    with pytest.raises(ModelError, match="lists none of the 2 tokens"):
        scored_rows(Path("m"), 8, np.array([5, 1]), np.array([0, 2]))
