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
from specdec_ext.ops.weight_blocks import E4M3_FORMATS

ROTATED_BYTES = 200 << 20
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate-up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
ROWS = (1, 8, 11, 27, 64, 84, 128)
# Weights in blocks: bits of an element as the kernels read it, scales included.
PACKED_BITS = {"q8_0": 8.5, "q4_0": 4.5, "q4_1": 5.0, "q4_g": 5.0, "q8_g": 8.5, "f8_g": 8.5,
               "f8_a8": 8.5, "q4_k": 6.0, "q5_k": 10.0, "q6_k": 10.0}  # fmt: skip
# Elements and bytes of a block, the factors in it: (first byte, dtype).
BLOCKS: dict[str, tuple[int, int, list[tuple[int, torch.dtype]]]] = {
    "q8_0": (32, 34, [(0, torch.float16)]),
    "q4_0": (32, 18, [(0, torch.float16)]),
    "q4_1": (32, 20, [(0, torch.float16), (2, torch.float16)]),
    "q4_g": (32, 24, [(0, torch.float32), (4, torch.float32)]),
    "q8_g": (32, 36, [(0, torch.float32)]),
    "f8_g": (64, 68, [(0, torch.float32)]),
    "f8_a8": (64, 68, [(0, torch.float32)]),
    "q4_k": (256, 144, [(0, torch.float16), (2, torch.float16)]),
    "q5_k": (256, 176, [(0, torch.float16), (2, torch.float16)]),
    "q6_k": (256, 210, [(208, torch.float16)]),
}
PACKED_ROWS = (1, 11, 84)
# Rows of prompts, whose products in fast mode are torch's, with the weight unpacked.
PROMPT_ROWS = {"f8_a8": (512, 1024, 2048), "q4_0": (1024, 2048), "q8_0": (1024, 2048)}
CHECKED_COLUMNS = 4096  # of a packed weight, which is unpacked for that


@dataclass(frozen=True)
class LinearCell:
    """`rows` rows by one weight [columns, depth], in bf16; `format`: of the weight."""

    weight: str
    rows: int
    columns: int
    depth: int
    format: str = "bf16"
    kind: str = "linear"

    @property
    def name(self) -> str:
        width = "" if self.format == "bf16" else f"-{self.format}"
        return f"linear-{self.weight}{width}-m{self.rows}"

    @property
    def weight_bytes(self) -> int:
        return int(self.columns * self.depth * PACKED_BITS.get(self.format, 16) / 8)

    def work(self) -> floors.Work:
        weight = self.weight_bytes
        rows = self.rows * (self.columns + self.depth) * 2
        return floors.Work(weight + rows, 2 * self.rows * self.columns * self.depth)

    def tiny(self) -> LinearCell:
        """Depths of the same tile; those beyond 4096 stay as they are and are cut over blocks."""
        depth = 4160 if self.depth > 4096 and self.rows == 1 else 192
        elements = BLOCKS[self.format][0] if self.format in BLOCKS else 1
        depth = -(-depth // elements) * elements
        return dataclasses.replace(self, columns=136, depth=depth)


def linear_cells() -> list[LinearCell]:
    """One user's step first: one row of every weight."""
    found = [LinearCell(name, rows, *shape) for rows in ROWS for name, shape in SHAPES.items()]
    found += [
        LinearCell(name, rows, *shape, format)
        for format in PACKED_BITS
        for rows in PACKED_ROWS + PROMPT_ROWS.get(format, ())
        for name, shape in SHAPES.items()
    ]
    return found


def random_packed(
    columns: int, depth: int, format: str, generator: torch.Generator
) -> ops.PackedWeight:
    """Random numbers with scales near 2^-7, which a model's are, one for a column; K formats
    multiply them by whole numbers."""
    elements, size, factors = BLOCKS[format]
    blocks = torch.randint(
        0, 256, (columns, depth // elements, size), dtype=torch.uint8, device=generator.device,
        generator=generator,
    )  # fmt: skip
    if format in E4M3_FORMATS:
        blocks &= 0xF7  # no NaN
    drawn = torch.randint(32, 96, (columns, 1, 1), device=generator.device, generator=generator)
    scale = drawn.float() * 2.0 ** (-17 if format.endswith("_k") else -13)
    # The middle of the numbers stands for about zero.
    middle = -16.0 if format == "q5_k" else -8.0
    values = [scale, (scale if not format.endswith("_k") else -scale) * middle]
    for (first, dtype), value in zip(factors, values, strict=False):
        bytes_of = value.to(dtype).view(torch.uint8)
        blocks[..., first : first + dtype.itemsize] = bytes_of
    return ops.pack_weight(blocks.flatten(1), format)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows in e4m3, and their scales [R, 1]."""
    largest = x.float().abs().amax(1, keepdim=True)
    # By a tensor: torch multiplies by a number's inverse on a device, which is another scale.
    scale = (largest / torch.full_like(largest, 448)).clamp(min=2.0**-100)
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _scaled_mm(x: Tensor, floats: list[Tensor]) -> timing.Program:
    """Returns torch's product of e4m3 with scales of rows and columns; x is rounded before."""
    numbers, scale = rounded(x)
    weights = [rounded(weight) for weight in floats]

    def run(index: int) -> None:
        weight, factor = weights[index % len(weights)]
        torch._scaled_mm(
            numbers, weight.t(), scale_a=scale, scale_b=factor.t(), out_dtype=torch.bfloat16
        )

    return run


def _in_fast_mode(
    x: Tensor, weights: list[ops.PackedWeight], out: Tensor, target: Target
) -> timing.Program:
    """Returns the products that a model in fast mode makes of these weights."""
    from specdec_ext.models.device_products import Products
    from specdec_ext.models.place import Place

    place = Place(target.backend, str(target.device), target.backend)
    products = Products(weights[:1], place, dtype=x.dtype, max_rows=len(x), exact=False)

    def run(index: int) -> None:
        products(x, weights[index % len(weights)], None, out)

    return run


def _check_columns(x: Tensor, weight: ops.PackedWeight, out: Tensor) -> None:
    """As _check(), of some columns of a packed weight."""
    step = -(-weight.shape[0] // CHECKED_COLUMNS)
    columns = torch.arange(0, weight.shape[0], step, device=out.device)
    if weight.format == "f8_a8":  # its weights are not rounded to 16 bits
        numbers, scale = rounded(x)
        _check(numbers.float() * scale, weight.rows(columns, torch.float32), out[:, columns])
    else:
        _check(x, weight.rows(columns, x.dtype), out[:, columns])


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
        count = max(1, -(-ROTATED_BYTES // cell.weight_bytes))
    weights: list[Tensor | ops.PackedWeight]
    floats = [random(cell.columns, cell.depth)]
    if cell.format == "bf16":
        floats += [random(cell.columns, cell.depth) for _ in range(1, count)]
        weights = [*floats]
    else:  # torch's product is of the same matrix in bf16, which is what it would be instead
        weights = [random_packed(cell.columns, cell.depth, cell.format, generator)
                   for _ in range(count)]  # fmt: skip
        least = max(1, -(-count * cell.weight_bytes // (cell.columns * cell.depth * 2)))
        floats += [random(cell.columns, cell.depth) for _ in range(1, least)]
    x = random(cell.rows, cell.depth)
    out = torch.full((cell.rows, cell.columns), torch.nan, dtype=x.dtype, device=x.device)

    def ours(index: int) -> None:
        ops.linear(x, weights[index], out=out, constant_weight=True, backend=target.backend)

    def torch_matmul(index: int) -> None:
        torch.mm(x, floats[index % len(floats)].t(), out=out)

    programs: dict[str, timing.Program] = {"ours": ours, "torch": torch_matmul}
    if cell.format == "f8_a8":
        programs["scaled_mm"] = _scaled_mm(x, floats)
    ours(0)
    first = weights[0]
    if isinstance(first, ops.PackedWeight):
        _check_columns(x, first, out)
        if cell.rows in PROMPT_ROWS.get(cell.format, ()):
            packed = [weight for weight in weights if isinstance(weight, ops.PackedWeight)]
            other = torch.full_like(out, torch.nan)
            programs["fast"] = _in_fast_mode(x, packed, other, target)
            programs["fast"](0)
            _check_columns(x, first, other)
    else:
        _check(x, first, out)
    for row in sorted({0, cell.rows // 2, cell.rows - 1}):
        alone = torch.empty_like(out[:1])
        ops.linear(x[row : row + 1], weights[0], out=alone, backend=target.backend)
        if not torch.equal(alone[0], out[row]):
            raise ArithmeticError(f"row {row} of {cell.rows} has other bits than alone")
    rounds = timer.measure(programs, count)
    if "ours" in timer.failures:
        raise RuntimeError(timer.failures["ours"])
    work = cell.work()
    record = {**dataclasses.asdict(cell), **describe(work), "status": "ok"}
    record |= figures(work, rounds.get("ours", []))
    others = {name: figures(work, rounds.get(name, [])) for name in programs if name != "ours"}
    return {**record, "others": others}
