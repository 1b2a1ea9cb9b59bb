"""Every kernel once on small inputs, checked: what a device meets first, and the sanitizer.

python -m benchmarks.gpu.small_set [--backend cuda]     prints one line per call
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import attention, linear, slot_ops, step_ops
from benchmarks.gpu import problem as problems
from benchmarks.gpu.cells import AttentionCell, SlotCell, StepCell
from benchmarks.gpu.ours import Attention, open_backend
from benchmarks.gpu.run import Target
from benchmarks.gpu.timing import NoTimer
from specdec_ext import ops

Check = Callable[[Target], dict[str, Any]]  # a part's record; raises ArithmeticError

# Ragged pages, more rows than a tile, a split context, 8-bit K/V, a prompt.
ATTENTION = (
    AttentionCell(2, 5, 200, num_kv_heads=2, num_heads=8),
    AttentionCell(1, 70, 330, num_kv_heads=1, num_heads=2, page_size=16),
    AttentionCell(2, 5, 200, num_kv_heads=1, num_heads=4, kv_dtype="float8_e4m3fn"),
    AttentionCell(2, 5, 200, num_kv_heads=1, num_heads=4, kv_dtype="float8_e4m3fn", fp8_math=True),
    AttentionCell(1, 130, 0, num_kv_heads=1, num_heads=2),
)
GENERIC = AttentionCell(2, 5, 200, num_kv_heads=1, num_heads=4, head_dim=24)  # no fast kernel
STEP = StepCell("step", 2, 9, 80, 2, num_heads=4, num_kv_heads=2, vocab=1000)
OPERATIONS = (
    "build_step",
    "append",
    "rope_append",
    "compact",
    "argmax",
    "sample",
    "match",
    "accept",
)
LINEAR_ROWS = (1, 12, 20, 40, 100)  # every tile
ONE_TILE = 64  # rows of a tile: one warpgroup that computes


def instance_cell(row: Any) -> AttentionCell:
    """A call that fills a tile of an instance and a part of the next one, over several chunks."""
    e4m3 = row["kv_dtype"] == "float8_e4m3fn"
    return AttentionCell(
        2,
        row["row_tile"] // 2 + 3,
        700,
        num_kv_heads=1,
        num_heads=2,
        head_dim=row["head_dim"],
        dtype=row["dtype"],
        kv_dtype=row["kv_dtype"],
        fp8_math=e4m3 and row["math_dtype"] == row["kv_dtype"],
    )


def check_instance(row: Any, target: Target) -> dict[str, Any]:
    """One instance of the table in both modes over poisoned outputs, against float32."""
    if row["family"] == "hopper" and ops.device_limits(target.backend).major != 9:
        return {"status": "unsupported", "summary": "not a Hopper device"}
    sets = [problems.make_sets(instance_cell(row), target.device, _pool(target))[0]]
    worst = 0.0
    for exact in (True, False):
        program = Attention(sets, target, exact, row["name"])
        worst = max(worst, attention.check(program, sets))
        if bool(program.status.any()):
            raise ArithmeticError(f"status {program.status.tolist()}")
    return {"status": "ok", "summary": f"error {worst:.2g}"}


def _pool(target: Target) -> problems.RandomPool:
    return problems.RandomPool(target.device)


def _attention(cell: AttentionCell, target: Target) -> dict[str, Any]:
    record = attention.measure(cell, target, NoTimer(), _pool(target), with_peers=False)
    return {"status": record["status"]}


def _bits(target: Target) -> dict[str, Any]:
    bits = attention.count_differing(ATTENTION[0], target, _pool(target))
    return {"status": bits["status"], "summary": f"{bits['differing']} elements differ"}


def _operation(kind: str, target: Target) -> dict[str, Any]:
    op = dataclasses.replace(STEP, kind=kind)
    return {"status": step_ops.measure_op(op, target, NoTimer())["status"]}


def _linear(rows: int, target: Target) -> dict[str, Any]:
    product = linear.LinearCell("small", rows, 136, 4160 if rows < 40 else 192)
    return {"status": linear.measure(product, target, NoTimer())["status"]}


def _slots(method: str, target: Target) -> dict[str, Any]:
    cell = SlotCell(method, 2, 80, alphabet=9)
    return {"status": slot_ops.measure(cell, target, NoTimer())["status"]}


def _whole_step(target: Target) -> dict[str, Any]:
    step = step_ops.Step(STEP, target, STEP.layers)
    step.whole()
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    if not bool(torch.isfinite(step.out).all()):
        raise ArithmeticError("a whole step gives no finite result")
    return {"status": "ok"}


def operations() -> list[tuple[str, Check]]:
    """Every kernel that is not an attention instance, and attention as the package chooses it."""
    found: list[tuple[str, Check]] = [
        (kind.replace("_", "-"), partial(_operation, kind)) for kind in OPERATIONS
    ]
    found += [(f"linear-m{rows}", partial(_linear, rows)) for rows in LINEAR_ROWS]
    found += [(f"slots-{method}", partial(_slots, method)) for method in ("lookahead", "ngram")]
    found.append(("generic", partial(_attention, GENERIC)))
    found += [(cell.name, partial(_attention, cell)) for cell in ATTENTION]
    return [*found, ("bits", _bits), ("whole-step", _whole_step)]


def instances(several_tiles: bool) -> list[tuple[str, Check]]:
    """The attention table: tiles of one computing warpgroup, or of two and three. The latter hand
    registers over between warpgroups, so they come after everything that cannot hang there."""
    return [
        (row["name"], partial(check_instance, row))
        for row in ops.supported_attention()
        if (row["row_tile"] > ONE_TILE) == several_tiles
    ]


def run(target: Target) -> None:
    """Raises   ArithmeticError if a result is wrong."""
    open_backend(target)
    for name, check in operations():
        record = check(target)
        print(f"{name}: {record['status']}", flush=True)
        if record["status"] == "failed":
            raise ArithmeticError(f"{name}: {record}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", default="cuda")
    args = parser.parse_args()
    device = torch.device("cuda" if args.backend == "cuda" else "cpu")
    run(Target(args.backend, device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
