"""Products of few rows with the matrices of an 8B model: ours, checked and set against the weight's
bytes and torch's.

A cell's weights rotate while one of them is smaller than 200 MB, so that L2 does not answer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import floors, timing
from benchmarks.gpu.attention import describe, figures
from benchmarks.gpu.run import Target
from specdec_ext import ops

ROTATED_BYTES = 200 << 20
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate-up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
ROWS = (1, 8, 11, 27, 64, 84, 128)


@dataclass(frozen=True)
class LinearCell:
    """`rows` rows by one weight [columns, depth], bf16."""

    weight: str
    rows: int
    columns: int
    depth: int
    kind: str = "linear"

    @property
    def name(self) -> str:
        return f"linear-{self.weight}-m{self.rows}"

    def work(self) -> floors.Work:
        weight = self.columns * self.depth * 2
        rows = self.rows * (self.columns + self.depth) * 2
        return floors.Work(weight + rows, 2 * self.rows * self.columns * self.depth)

    def tiny(self) -> LinearCell:
        """Depths of the same tile; those beyond 4096 stay as they are and are cut over blocks."""
        depth = 4160 if self.depth > 4096 and self.rows == 1 else 192
        return dataclasses.replace(self, columns=136, depth=depth)


def linear_cells() -> list[LinearCell]:
    """One user's step first: one row of every weight."""
    return [LinearCell(name, rows, *shape) for rows in ROWS for name, shape in SHAPES.items()]


def _check(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Raises ArithmeticError if a result is further from float32 than rounding explains."""
    expected = x.float() @ weight.float().t()
    size = x.float().abs() @ weight.float().abs().t()
    error = (out.float() - expected).abs() - 2.0**-8 * expected.abs() - 2.0**-14 * size
    if not bool((error <= 0).all()):
        raise ArithmeticError(f"error beyond rounding: {error.max().item():.3g}")


def measure(cell: LinearCell, target: Target, timer: timing.Timer) -> dict[str, Any]:
    """Returns the record of one cell.

    Raises   ArithmeticError if a result is wrong, or a row's bits depend on the rows beside it.
    """
    generator = torch.Generator(device=target.device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        values = torch.randn(*shape, device=target.device, generator=generator)
        return values.to(torch.bfloat16)

    count = 1
    if not isinstance(timer, timing.NoTimer):
        count = max(1, -(-ROTATED_BYTES // (cell.columns * cell.depth * 2)))
    weights = [random(cell.columns, cell.depth) for _ in range(count)]
    x = random(cell.rows, cell.depth)
    out = torch.full((cell.rows, cell.columns), torch.nan, dtype=x.dtype, device=x.device)

    def ours(index: int) -> None:
        ops.linear(x, weights[index], out=out, constant_weight=True, backend=target.backend)

    def torch_matmul(index: int) -> None:
        torch.mm(x, weights[index].t(), out=out)

    ours(0)
    _check(x, weights[0], out)
    for row in sorted({0, cell.rows // 2, cell.rows - 1}):
        alone = torch.empty_like(out[:1])
        ops.linear(x[row : row + 1], weights[0], out=alone, backend=target.backend)
        if not torch.equal(alone[0], out[row]):
            raise ArithmeticError(f"row {row} of {cell.rows} has other bits than alone")
    programs: dict[str, timing.Program] = {"ours": ours, "torch": torch_matmul}
    rounds = timer.measure(programs, count)
    if "ours" in timer.failures:
        raise RuntimeError(timer.failures["ours"])
    work = cell.work()
    record = {**dataclasses.asdict(cell), **describe(work), "status": "ok"}
    record |= figures(work, rounds.get("ours", []))
    return {**record, "others": {"torch": figures(work, rounds.get("torch", []))}}
