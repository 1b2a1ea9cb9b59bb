"""A draft model on a device of its own: what one device gives, and nothing of one on the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from method_cases import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    Folders,
    Where,
    counts_of,
    drafter_of,
    open_llm,
    record_steps,
    texts_of,
)

from emulators import EMULATED
from specdec_ext import DraftTargetDecodingConfig
from two_devices import FIRST, SECOND, Watch, watched

pytestmark = EMULATED

FEW = PROMPTS[1:4]
REJECTION = dataclasses.replace(SAMPLED, acceptance="rejection")
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"max_draft_len": 4},
    "tree": {"max_draft_len": 9, "top_k": 3, "max_draft_depth": 4},
}


@pytest.fixture
def watch() -> Iterator[Watch]:
    with watched() as watch:
        yield watch


def spec_of(models: Folders, device: str | None, **options: Any) -> DraftTargetDecodingConfig:
    options = {**SHAPES["chain"], "adaptive": False, **options}
    return DraftTargetDecodingConfig(models["near"], device=device, **options)


def said(llm: Any) -> Any:
    """Everything that must not depend on where drafts are made."""
    return [texts_of(llm, law, FEW) for law in (GREEDY, SAMPLED, REJECTION)], counts_of(llm)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_texts_drafts_and_acceptance(
    models: Folders, plain_texts: dict[str, Any], watch: Watch, shape: str, depth: int
) -> None:
    found = []
    for device in (None, SECOND):
        spec = spec_of(models, device, **SHAPES[shape])
        with open_llm(models, spec, Where(FIRST, depth)) as llm:
            found.append(said(llm))
            assert drafter_of(llm).stats()["device"] == (device or FIRST)
        assert bool(watch.copies) == (device is not None)
    assert found[0] == found[1]
    assert found[1][0][:2] == [plain_texts["greedy"][1:4], plain_texts["sampled"][1:4]]
    assert not watch.faults
