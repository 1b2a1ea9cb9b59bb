"""StepModel.head and head_rows: the target's output head, on its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_zoo import ADAPTED, NATIVE
from plan_builder import Driver, Sequence, prompt_ids

from specdec_ext import _core
from specdec_ext.errors import UnsupportedModelError
from specdec_ext.models import load_model


def step(model: Any, count: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden, scores) of a prompt of `count` tokens."""
    driver = Driver(model)
    plan = driver._plan([(Sequence(), prompt_ids(count, 5))], None, True, True)
    hidden = torch.full((plan.num_logit_rows, model.hidden_size), float("nan"))
    return hidden, torch.as_tensor(model.forward(plan, hidden)).clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen2", "gemma2", "gemma3"])
def test_the_native_head_gives_the_bits_of_the_step(saved, family: str, dtype: str) -> None:
    model = load_model(saved(family).folder, dtype=dtype)
    assert model.impl == "native"
    hidden, scores = step(model)
    assert torch.equal(model.head(hidden), scores)
    for rows in (hidden[:1], hidden[3:7], hidden.t().contiguous().t()[2:5]):
        first = next(i for i in range(len(hidden)) if torch.equal(hidden[i], rows[0]))
        assert torch.equal(model.head(rows), scores[first : first + len(rows)])
    assert model.head(hidden[:0]).shape == (0, model.vocab_size)


@pytest.mark.parametrize("family", [*sorted(ADAPTED), "gemma2", "llama"])
def test_the_adapters_head_gives_the_scores_of_the_step(saved, family: str) -> None:
    model = load_model(saved(family).folder, model_impl="transformers")
    hidden, scores = step(model)
    torch.testing.assert_close(model.head(hidden), scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("family", [*sorted(NATIVE)[:3], "cohere", "gpt2"])
def test_head_rows_are_rows_of_the_weight(saved, family: str, impl: str) -> None:
    if impl == "native" and family not in NATIVE:
        pytest.skip("a family of the adapter alone")
    reference = saved(family)
    model = load_model(reference.folder, model_impl=impl)
    ids = torch.tensor([198, 0, 7, 7, 100])
    weight = reference.model.get_output_embeddings().weight
    scale = 0.5 if family == "cohere" else 1.0
    assert torch.equal(model.head_rows(ids), weight[ids].float() * scale)
    assert model.head_rows(ids[:0]).shape == (0, model.hidden_size)
    with pytest.raises(ValueError, match=r"ids\[1\] = 199"):
        model.head_rows(torch.tensor([0, 199]))


def test_a_head_that_nothing_explains_is_refused_when_it_is_asked_for(saved) -> None:
    """The model itself goes on: only drafters that use its head cannot."""
    from specdec_ext.models import output_head

    model = load_model(saved("granite").folder, model_impl="transformers")
    hidden, scores = step(model)
    embedding = model._model.get_output_embeddings()
    with pytest.raises(UnsupportedModelError, match="not its output embedding's with a scale"):
        output_head.OutputHead(embedding, object(), torch.float32, hidden, scores)
    model._head = "for a reason"
    with pytest.raises(UnsupportedModelError, match="cannot be used on its own: for a reason"):
        model.head(hidden)


def test_bad_arguments_are_refused() -> None:
    linear = _core.PackedLinear(torch.randn(5, 3))
    with pytest.raises(ValueError, match=r"ids\[0\] = -1: rows are 0..4"):
        linear.unpack_rows(torch.tensor([-1], dtype=torch.int32), torch.empty(1, 3))
    with pytest.raises(TypeError):
        linear.unpack_rows(torch.tensor([1]), torch.empty(1, 3))
    with pytest.raises(ValueError, match="out"):
        linear.unpack_rows(torch.tensor([1], dtype=torch.int32), torch.empty(2, 3))
