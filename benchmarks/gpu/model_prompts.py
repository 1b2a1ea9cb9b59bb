"""Products of a prompt with packed weights: this package's kernels, and torch's of the weight
unpacked, as the model of docs/gpu.md sees both.

    python -m benchmarks.gpu.model --prompts
"""

from __future__ import annotations

from benchmarks import common
from benchmarks.gpu.linear import PACKED_BITS, PROMPT_ROWS, SHAPES
from benchmarks.gpu.machine import Device, Kernel
from benchmarks.gpu.model_ops import product

ROWS = (256, 512, 768, 1024, 2048)
# The share of a dense product's rate that torch reached for four weights of 8 bits with 512 and
# 2048 rows: 0.65 to 0.87 (h200-2026-11-27-780d7a8).
TORCH_SHARE = 0.75
LAYER = ("qkv", "o", "gate-up", "down")


def unpacked_product(
    rows: int, columns: int, depth: int, device: Device, format: str
) -> tuple[Kernel, ...]:
    """Returns what UnpackedProducts launches for one weight [columns, depth]."""
    element = 1 if format == "f8_a8" else 2
    packed = columns * depth * PACKED_BITS[format] / 8
    matrix = columns * depth * element
    inputs, result = rows * depth * element, rows * columns * 2
    start = device.launch_us + device.first_load_us

    def moved(num_bytes: float) -> float:
        return num_bytes / device.hbm_bytes_per_s * 1e6

    unpack = Kernel("unpack", {"HBM": moved(packed + matrix)}, start)
    rate = device.tensor_flops * 2 / element * TORCH_SHARE
    needs = {
        "tensor": 2 * rows * columns * depth / rate * 1e6,
        "HBM": moved(matrix + inputs + result),
    }
    kernels = (unpack, Kernel("torch", needs, start))
    if format != "f8_a8":
        return kernels
    # x is read twice, the second time from L2.
    return (Kernel("e4m3_rows", {"HBM": moved(rows * depth * 3)}, start), *kernels)


def both_ways(rows: int, format: str, device: Device) -> tuple[float, float]:
    """Returns microseconds of the four products of a layer: by this package's kernel, unpacked."""
    ours = sum(product(rows, *SHAPES[name], device, format).us for name in LAYER)
    theirs = sum(
        kernel.us
        for name in LAYER
        for kernel in unpacked_product(rows, *SHAPES[name], device, format)
    )
    return ours, theirs


def table(device: Device | None = None) -> str:
    """Returns the markdown."""
    lines = []
    for format in PROMPT_ROWS:
        line = [f"`{format}`"]
        for rows in ROWS:
            ours, theirs = both_ways(rows, format, device or Device())
            line.append(f"{ours:.0f}, {theirs:.0f}")
        lines.append(line)
    return common.markdown(["format", *(f"{rows} rows" for rows in ROWS)], lines)
