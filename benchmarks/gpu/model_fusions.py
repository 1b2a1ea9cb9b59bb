"""What it saves to let one kernel do the work of two: the fusions that were thought of.

    python -m benchmarks.gpu.model --fusions

docs/gpu.md holds the table (`--write` renews it). A launch between two kernels is saved where the
first one knows at the launch that the second has nothing left to do, or where one of them takes the
work of the other whole; what the joined kernel waits for instead is counted against it.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import common
from benchmarks.gpu.cells import AttentionCell
from benchmarks.gpu.engine_cells import ModelCell
from benchmarks.gpu.machine import Device
from benchmarks.gpu.model_attention import attention
from benchmarks.gpu.model_ops import model_pass

WORTH_US = 3.0  # of a step or a call: what a fusion has to save
WHOLE, SUMS = "main writes whole jobs, fast mode", "norms and the append add up sums of slices"
BUILT = frozenset({WHOLE, SUMS})


@dataclass(frozen=True)
class Fusion:
    what: str
    where: str  # which step or call
    saved_us: float
    of_us: float  # the step or call
    why: str

    @property
    def worth_it(self) -> str:
        if self.what in BUILT:
            return "built"
        return "yes" if self.saved_us >= WORTH_US else "no"


def fusions(device: Device | None = None) -> list[Fusion]:
    from benchmarks.gpu.model import modelled

    device = device or Device()
    every = modelled()
    start = device.launch_us + device.first_load_us
    steps = {
        cell.name: cell
        for cell in (ModelCell(1, 1, numerics="exact"), ModelCell(8, 27, numerics="exact"))
    }
    found = []
    # finish stays, as only the device knows which jobs are cut.
    for requests, context in ((8, 16384), (32, 16384), (32, 2048)):
        cell = AttentionCell(requests, 64, context)
        apart = attention(cell, device, exact=False, main_writes=False).us
        found.append(
            Fusion(
                WHOLE,
                cell.name,
                apart - attention(cell, device, exact=False).us,
                apart,
                "states written and read",
            )
        )
    for name, step in steps.items():
        layer = AttentionCell(step.requests, step.rows, step.context)
        us = every[name](device).us
        apart = model_pass(step, device, leaves_sums=False).us
        found.append(
            Fusion(
                SUMS,
                f"{name}, {step.layers} layers",
                apart - us,
                apart,
                "three launches a layer, the results once more through L2",
            )
        )
        found.append(
            Fusion(
                "append and RoPE in the QKV product",
                f"{name}, {step.layers} layers",
                step.layers * (device.launch_us + _rotated_us(layer, device)),
                us,
                "a launch, q, k and v once more through L2",
            )
        )
        # Pieces are counted and read back by who comes last in place of a kernel.
        joined = start - 2 * device.l2_latency_us
        found.append(
            Fusion(
                "argmax and its join", name, joined, us, "a launch, less a count and a read back"
            )
        )
        # Every block waits for the path, which one of them decides.
        found.append(
            Fusion(
                "compact and commit",
                name,
                start - device.l2_latency_us,
                us,
                "a launch, less the wait for the path",
            )
        )
    return found


def _rotated_us(cell: AttentionCell, device: Device) -> float:
    """q, k and v of a layer, written by the product and read again."""
    heads = cell.num_heads + 2 * cell.num_kv_heads
    rows = cell.requests * cell.rows
    return 2 * rows * heads * cell.head_dim * 2 / device.l2_bytes_per_s * 1e6


def table(found: list[Fusion]) -> str:
    """Returns the markdown."""
    rows = [
        [
            f.what,
            f.where,
            f"{f.saved_us:.1f}",
            f"{100 * f.saved_us / f.of_us:.1f} %",
            f.worth_it,
            f.why,
        ]
        for f in found
    ]
    head = ["joined", "step or call", "saved, us", "of it", "worth it", "what is saved"]
    return common.markdown(head, rows)
