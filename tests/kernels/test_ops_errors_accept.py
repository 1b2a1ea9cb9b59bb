"""Every refusal of sample_rows and accept_step names the argument, what it is and has to be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from ops_arguments import int32, refused

from specdec_ext import ops

R, B, V = 5, 2, 7


def good() -> dict[str, Any]:
    """Two requests of 3 and 2 rows."""
    return dict(
        scores=torch.zeros(R, V),
        cu_logits=int32(0, 3, 5),
        positions=int32(4, 5, 5, 9, 10),
        temperature=torch.ones(B),
        top_k=int32(0, 0),
        top_p=torch.ones(B),
        min_p=torch.zeros(B),
        seed=torch.tensor([1, -1]),
    )


def laws_of(arguments: dict[str, Any]) -> ops.SamplingLaws:
    names = [field.name for field in dataclasses.fields(ops.SamplingLaws)]
    return ops.SamplingLaws(**{name: arguments.pop(name) for name in names})


def sample(**changed: Any) -> None:
    given = {**good(), "out": int32(*[0] * R), **changed}
    ops.sample_rows(laws=laws_of(given), **given)


def accept(**changed: Any) -> None:
    given: dict[str, Any] = {
        **good(),
        "tokens": int32(1, 2, 3, 4, 5),
        "parents": int32(-1, 0, 0, -1, 0),
        "acceptance": torch.tensor([1, 0], dtype=torch.uint8),
        **changed,
    }
    results = ops.make_accept_results(R, B)
    outputs = {k: given.pop(k) for k in list(given) if hasattr(results, k)}
    probs = {k: given.pop(k) for k in list(given) if k in PROBS or k in OPTIONAL}
    drafts = ops.DraftProbs(**{"probs": None, **probs}) if probs else None
    ops.accept_step(
        laws=laws_of(given),
        results=dataclasses.replace(results, **outputs),
        draft_probs=drafts,
        **given,
    )


PROBS = {"probs": torch.full((R, V), 1 / V)}
OPTIONAL = ("vocab_ids", "draft_columns", "has_probs", "replacement")
REDUCED = {
    "probs": torch.full((R, 2), 0.5),
    "vocab_ids": int32(2, 5),
    "draft_columns": int32(*[0] * R),
}


def uint8(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_the_unchanged_arguments_are_accepted() -> None:
    sample()
    sample(scores=torch.zeros(R, V, dtype=torch.bfloat16), purpose="draft")
    sample(status=int32(0, 0))
    accept()
    accept(**PROBS)
    accept(**REDUCED, has_probs=uint8(1, 0), replacement=uint8(0, 1))
    accept(posterior_threshold=torch.ones(B), posterior_alpha=torch.ones(B))
    accept(acceptance_threshold=torch.full((B,), 0.5), status=int32(0, 0))


BOTH: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "scores is a list: give a tensor", dict(scores=[1.0])),
    (TypeError, "scores has dtype int32: expected float32 or bfloat16 or float16",
     dict(scores=torch.zeros(R, V, dtype=torch.int32))),
    (ValueError, "scores has shape [5]: expected [R, V] = [any, any]", dict(scores=torch.zeros(R))),
    (ValueError, "scores has 0 columns: 1..1048576 tokens can be drawn from",
     dict(scores=torch.zeros(R, 0))),
    (ValueError, "scores has 1048577 columns", dict(scores=torch.empty(R, 2**20 + 1))),
    (ValueError, "scores has stride 5 on its last axis", dict(scores=torch.zeros(V, R).T)),
    (TypeError, "cu_logits has dtype int64: expected int32",
     dict(cu_logits=torch.tensor([0, 3, 5]))),
    (ValueError, "cu_logits has 0 entries: one more than requests", dict(cu_logits=int32())),
    (ValueError, "cu_logits[0] = 1: it begins with 0", dict(cu_logits=int32(1, 3, 5))),
    (ValueError, "cu_logits[2] = 2: it never decreases and ends within the 5 rows of scores",
     dict(cu_logits=int32(0, 3, 2))),
    (ValueError, "cu_logits[2] = 6: it never decreases", dict(cu_logits=int32(0, 3, 6))),
    (ValueError, "positions has shape [4]: expected [R] = [5]", dict(positions=int32(1, 2, 3, 4))),
    (TypeError, "positions has dtype int64: expected int32", dict(positions=torch.zeros(R).long())),
    (ValueError, "temperature has shape [3]: expected [B] = [2]", dict(temperature=torch.ones(3))),
    (TypeError, "temperature has dtype float64", dict(temperature=torch.ones(B).double())),
    (TypeError, "top_k has dtype int64: expected int32", dict(top_k=torch.zeros(B).long())),
    (TypeError, "seed has dtype int32: expected int64", dict(seed=int32(1, 2))),
    (ValueError, "request 1 has temperature = -1", dict(temperature=torch.tensor([1.0, -1.0]))),
    (ValueError, "request 0 has temperature = nan", dict(temperature=torch.full((B,), torch.nan))),
    (ValueError, "request 0 has temperature = inf", dict(temperature=torch.full((B,), torch.inf))),
    (ValueError, "top_k = -3", dict(top_k=int32(0, -3))),
    (ValueError, "top_p = 0,", dict(top_p=torch.zeros(B))),
    (ValueError, "top_p = 1.5", dict(top_p=torch.full((B,), 1.5))),
    (ValueError, "min_p = 2:", dict(min_p=torch.full((B,), 2.0))),
    (ValueError, "status has shape [3]: expected [B] = [2]", dict(status=int32(0, 0, 0))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "changed"), BOTH, ids=[a[1][:40] for a in BOTH])
def test_both(kind: type[Exception], text: str, changed: dict[str, Any]) -> None:
    refused(kind, text, lambda: sample(**changed))
    refused(kind, text, lambda: accept(**changed))


def test_sample_rows() -> None:
    refused(ValueError, "purpose = 'dice': give 'token' or 'draft'", lambda: sample(purpose="dice"))
    refused(TypeError, "out has dtype float32: expected int32", lambda: sample(out=torch.zeros(R)))
    refused(
        ValueError, "out has shape [4]: expected [R] = [5]", lambda: sample(out=int32(0, 0, 0, 0))
    )


ACCEPT: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "tokens has shape [2]: expected [R] = [5]", dict(tokens=int32(1, 2))),
    (TypeError, "parents has dtype int64: expected int32", dict(parents=torch.zeros(R).long())),
    (TypeError, "acceptance has dtype int32: expected uint8", dict(acceptance=int32(0, 0))),
    (ValueError, "acceptance[1] = 5: an index into ops.ACCEPTANCE_RULES",
     dict(acceptance=uint8(0, 5))),
    (ValueError, "request 0 has posterior_threshold = 0,",
     dict(posterior_threshold=torch.zeros(B))),
    (ValueError, "posterior_alpha = 1.5", dict(posterior_alpha=torch.full((B,), 1.5))),
    (ValueError, "acceptance_threshold = nan",
     dict(acceptance_threshold=torch.full((B,), torch.nan))),
    (ValueError, "probs has shape [4, 7]: expected [R, columns] = [5, any]",
     dict(probs=torch.zeros(4, V))),
    (TypeError, "probs has dtype float16: expected float32", dict(probs=torch.zeros(R, V).half())),
    (ValueError, "probs has 2 columns, scores 7: give one column per token, or vocab_ids",
     dict(probs=torch.zeros(R, 2))),
    (ValueError, "probs has 8 columns: with vocab_ids 1..7 (the vocabulary)",
     {**REDUCED, "probs": torch.zeros(R, 8), "vocab_ids": int32(*range(8))}),
    (ValueError, "vocab_ids has shape [3]: expected [columns of probs] = [2]",
     {**REDUCED, "vocab_ids": int32(1, 2, 3)}),
    (ValueError, "vocab_ids[1] = 7: token ids are 0..6", {**REDUCED, "vocab_ids": int32(1, 7)}),
    (ValueError, "vocab_ids[1] = 2 is there twice", {**REDUCED, "vocab_ids": int32(2, 2)}),
    (ValueError, "vocab_ids and draft_columns belong together", {**REDUCED, "draft_columns": None}),
    (ValueError, "vocab_ids and draft_columns belong together",
     {**PROBS, "draft_columns": int32(*[0] * R)}),
    (ValueError, "vocab_ids, draft_columns, has_probs or replacement without probs",
     dict(replacement=uint8(0, 0))),
    (ValueError, "has_probs has shape [5]: expected [B] = [2]",
     {**PROBS, "has_probs": uint8(*[1] * R)}),
    (TypeError, "replacement has dtype bool: expected uint8",
     {**PROBS, "replacement": torch.zeros(B, dtype=torch.bool)}),
    (ValueError, "sampled has shape [4]: expected [R] = [5]", dict(sampled=int32(0, 0, 0, 0))),
    (ValueError, "path has shape [2, 5]: expected [B, 128] = [2, 128]",
     dict(path=torch.zeros(B, 5, dtype=torch.int32))),
    (ValueError, "emitted has shape [1, 128]: expected [B, 128] = [2, 128]",
     dict(emitted=torch.zeros(1, 128, dtype=torch.int32))),
    (TypeError, "path_len has dtype int64: expected int32", dict(path_len=torch.zeros(B).long())),
    (ValueError, "num_emitted has shape [3]: expected [B] = [2]", dict(num_emitted=int32(0, 0, 0))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "changed"), ACCEPT, ids=[a[1][:48] for a in ACCEPT])
def test_accept_step(kind: type[Exception], text: str, changed: dict[str, Any]) -> None:
    refused(kind, text, lambda: accept(**changed))


def test_a_refused_call_writes_nothing() -> None:
    sampled = torch.full((R,), -7, dtype=torch.int32)
    refused(ValueError, "top_k = -3", lambda: accept(sampled=sampled, top_k=int32(0, -3)))
    assert sampled.tolist() == [-7] * R
