"""The engine stage of the GPU runner, part by part, on the emulated device."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gpu import stages, texts
from benchmarks.gpu.engine_cells import TextsCell
from benchmarks.gpu.model_step import engine_of
from benchmarks.gpu.run import Target

from emulators import EMULATED

EMULATOR = Target("cuda-emu-fast", torch.device("cpu"))
PARTS = {part.name: part for part in stages.engine(EMULATOR)}


@EMULATED
@pytest.mark.parametrize("name", PARTS)
def test_a_part_works(name: str) -> None:
    record = PARTS[name].work()
    assert record["status"] == "ok", record


@EMULATED
def test_the_gap_of_two_tokens_is_that_of_their_scores() -> None:
    cell = TextsCell().tiny()
    with engine_of(cell, EMULATOR) as engine:
        [text] = texts.generate(engine, [[1, 2, 3]], 1)
        assert texts.gap(engine, [1, 2, 3], (text[0], text[0])) == 0.0
        others = [texts.gap(engine, [1, 2, 3], (text[0], token)) for token in (0, 1, 2, 3, 4, 5)]
    assert max(others) == float("inf")  # not among the best five
