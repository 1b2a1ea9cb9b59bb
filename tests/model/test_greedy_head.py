"""Greedy ids are those of the scores, whichever way the head is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec_ext import _core
from specdec_ext.models import load_model

VOCAB, PAGES, PAGE = 6007, 8, 16  # the last panel of the head is not whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True,
        max_position_embeddings=256, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # equal rows: the first of them is the answer
        table = model.model.embed_tokens.weight
        table[4000:4300] = table[100:400]
    path = tmp_path_factory.mktemp("greedy")
    model.save_pretrained(path)
    return path


def plan_of(tokens: list[int], needs_logits: bool) -> Any:
    return _core.make_step_plan(
        [tokens], kv_len=[0], page_table=[list(range(PAGES))], needs_logits=needs_logits
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_ids_are_those_of_the_scores(folder: Path, dtype: str) -> None:
    model = load_model(folder, dtype=dtype, max_rows=64)
    shape = (model.num_layers, PAGES, model.num_kv_heads, PAGE, model.head_dim)
    pages = [torch.zeros(shape, dtype=model.kv_dtype) for _ in range(2)]
    model.bind_cache(*pages)
    random = np.random.default_rng(1)
    for rows in (1, 2, 3, 7, 12, 13, 33, 64):
        tokens = [int(t) for t in random.integers(0, VOCAB, rows)]
        tokens[0] = 4000 + rows  # its row of the head has an equal one far in front
        ids = np.asarray(model.forward(plan_of(tokens, False))).copy()
        scores = torch.as_tensor(np.asarray(model.forward(plan_of(tokens, True)))).float()
        assert ids.tolist() == scores.argmax(dim=1).tolist() == model.best_ids.tolist()
        one = np.asarray(model.forward(plan_of(tokens[:1], False)))
        assert int(one[0]) == int(ids[0])


def save(config: Any, model_of: Any, path: Path, bad_token: int | None = None) -> Path:
    torch.manual_seed(3)
    model = model_of(config)
    if bad_token is not None:
        with torch.no_grad():
            model.lm_head.weight[bad_token] = float("nan")
    model.save_pretrained(path)
    return path


SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
    "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["softcap", "NaN"])
def test_ids_beside_scores(tmp_path: Path, kind: str) -> None:
    """A cap that rounds large scores together, of which the first is the best; a NaN in a row."""
    if kind == "softcap":
        config = Gemma2Config(vocab_size=VOCAB, final_logit_softcapping=0.01, **SMALL)
        folder = save(config, Gemma2ForCausalLM, tmp_path)
    else:
        config = LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=False, **SMALL)
        folder = save(config, LlamaForCausalLM, tmp_path, bad_token=5999)
    model = load_model(folder, dtype="float32", max_rows=64)
    shape = (model.num_layers, PAGES, model.num_kv_heads, PAGE, model.head_dim)
    pages = [torch.zeros(shape, dtype=model.kv_dtype) for _ in range(2)]
    model.bind_cache(*pages)
    random = np.random.default_rng(2)
    for rows in (1, 2, 13, 40):
        tokens = [int(t) for t in random.integers(0, VOCAB, rows)]
        ids = np.asarray(model.forward(plan_of(tokens, False))).tolist()
        scores = np.asarray(model.forward(plan_of(tokens, True)))
        best = scores.argmax(axis=1)
        if kind == "softcap":
            assert ((scores == scores.max(axis=1, keepdims=True)).sum(axis=1) > 1).all()
            assert ids == best.tolist() == model.best_ids.tolist()
        else:
            assert np.isnan(scores).any(axis=1).all()
            assert ids == [-1] * rows == model.best_ids.tolist()
