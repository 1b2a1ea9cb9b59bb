"""The linear cells of benchmarks/gpu: what they count, and that they notice a wrong product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.gpu import linear, timing
from benchmarks.gpu.linear import LinearCell
from benchmarks.gpu.run import Target

from emulators import EMULATED
from specdec_ext import ops

EMU = Target("cuda-emu-fast", torch.device("cpu"))


def test_one_row_of_every_weight_is_an_8b_models_step() -> None:
    ones = [cell for cell in linear.linear_cells() if cell.rows == 1]
    assert [cell.name for cell in ones][:2] == ["linear-qkv-m1", "linear-o-m1"]
    layers = sum(cell.work().needed_bytes for cell in ones if cell.weight != "head")
    head = next(cell for cell in ones if cell.weight == "head").work().needed_bytes
    assert 15.0e9 < 32 * layers + head < 15.1e9
    assert not any(cell.work().compute_bound for cell in linear.linear_cells())
    names = [cell.name for cell in linear.linear_cells()]
    assert len(set(names)) == len(names) == 35


@EMULATED
@pytest.mark.parametrize(("rows", "depth"), [(1, 4160), (27, 192)])
def test_a_cell_is_checked_and_not_timed_in_emulation(rows: int, depth: int) -> None:
    cell = LinearCell("down", rows, 4096, 14336).tiny()
    assert cell.depth == depth
    record = linear.measure(cell, EMU, timing.NoTimer())
    assert record["status"] == "ok" and record["us"] is None
    assert record["others"] == {"torch": {"us": None}}


@EMULATED
@pytest.mark.parametrize(
    ("mistake", "text"), [("value", "error beyond rounding"), ("bits", "row 0 of 8 has other bits")]
)
def test_a_wrong_product_is_noticed(
    monkeypatch: pytest.MonkeyPatch, mistake: str, text: str
) -> None:
    right = ops.linear

    def wrong(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        out = right(x, weight, **options)
        if mistake == "value":
            out[0, 3] *= 1.02
        elif len(out) == 1:  # alone
            out[0, 7] = torch.nextafter(out[0, 7], out[0, 7] + 1)
        return out

    monkeypatch.setattr(ops, "linear", wrong)
    with pytest.raises(ArithmeticError, match=text):
        linear.measure(LinearCell("o", 8, 136, 192), EMU, timing.NoTimer())
