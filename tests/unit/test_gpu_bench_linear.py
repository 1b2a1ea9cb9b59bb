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
    floats = [cell for cell in linear.linear_cells() if cell.format == "bf16"]
    ones = [cell for cell in floats if cell.rows == 1]
    assert [cell.name for cell in ones][:2] == ["linear-qkv-m1", "linear-o-m1"]
    layers = sum(cell.work().needed_bytes for cell in ones if cell.weight != "head")
    head = next(cell for cell in ones if cell.weight == "head").work().needed_bytes
    assert 15.0e9 < 32 * layers + head < 15.1e9
    assert not any(cell.work().compute_bound for cell in floats)
    names = [cell.name for cell in linear.linear_cells()]
    assert len(set(names)) == len(names) == 35 + 185 and len(floats) == 35
    assert "linear-gate-up-q4_0-m11" in names


@pytest.mark.parametrize("format", list(linear.PACKED_BITS))
def test_bytes_of_a_packed_weight(format: str) -> None:
    """Those that the package packs it in, of whole tiles."""
    packed = linear.random_packed(64, 256, format, torch.Generator().manual_seed(1))
    cell = LinearCell("o", 1, 64, 256, format)
    assert packed.format == format
    assert packed.nbytes == cell.weight_bytes
    values = packed.rows(torch.arange(64), torch.float32)
    assert 0.01 < values.std() < 2 and abs(values.mean()) < values.std()


@EMULATED
@pytest.mark.parametrize("format", ["bf16", *linear.PACKED_BITS])
@pytest.mark.parametrize(("rows", "depth"), [(1, 4160), (27, 192)])
def test_a_cell_is_checked_and_not_timed_in_emulation(rows: int, depth: int, format: str) -> None:
    cell = LinearCell("down", rows, 4096, 14336, format).tiny()
    assert depth <= cell.depth < depth + 256
    record = linear.measure(cell, EMU, timing.NoTimer())
    assert record["status"] == "ok" and record["us"] is None
    peers = ("torch", "scaled_mm") if format == "f8_a8" else ("torch",)
    assert record["others"] == {peer: {"us": None} for peer in peers}


@EMULATED
@pytest.mark.parametrize("format", list(linear.PROMPT_ROWS))
def test_prompts_are_measured_in_fast_mode_too(
    monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    names = {cell.name for cell in linear.linear_cells()}
    rows = linear.PROMPT_ROWS[format]
    assert {f"linear-o-{format}-m{count}" for count in rows} <= names
    cell = LinearCell("o", rows[0], 80, 192, format)
    record = linear.measure(cell, EMU, timing.NoTimer())
    assert record["others"]["fast"] == {"us": None}

    real = ops.unpack_weight

    def wrong(weight: ops.PackedWeight, **how: Any) -> torch.Tensor:
        out = real(weight, **how)
        out[5, 7:] = out[5, :-7].clone()
        return out

    monkeypatch.setattr(ops, "unpack_weight", wrong)
    with pytest.raises(ArithmeticError, match="error beyond rounding"):
        linear.measure(cell, EMU, timing.NoTimer())


@EMULATED
@pytest.mark.parametrize(
    ("mistake", "text"), [("value", "error beyond rounding"), ("bits", "row 0 of 8 has other bits")]
)
@pytest.mark.parametrize("format", ["bf16", "q4_1"])
def test_a_wrong_product_is_noticed(
    monkeypatch: pytest.MonkeyPatch, mistake: str, text: str, format: str
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
        linear.measure(LinearCell("o", 8, 136, 192, format), EMU, timing.NoTimer())
