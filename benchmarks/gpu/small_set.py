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
# Rows of x by blocks of 64 columns, of one multiprocessor and beside these: every tile of 9.0
# (linear_pick.h) with 64 columns, then those with 128 and 256, which serve wider weights.
LINEAR = (
    *((rows, 0, 2) for rows in (1, 12, 20, 40, 70, 100)),
    *((rows, 1, 1) for rows in (40, 70, 100)),
    *((rows, 3, 1) for rows in (30, 60)),
)
LINEAR_HANDING_OVER = (84, 3, 1)  # registers (kHandsOver of hopper_linear_tile.h)
PACKED_ROWS = (1, 84)  # by the middle ones of those widths
WARPGROUP = 128  # threads
# Tests, with references of their own, of every kernel that no call here runs.
ONCE = {
    "row_ops": "a_row_depends_on_itself_alone",
    "linear_sums": "adds_them_up",
    "beam_ops": "beams_and_trees_equal_the_reference",
    "growth_ops": "the_most_valuable_nodes_stay_and_are_read",
    "proposed_drafts": "what_a_drafter_says_is_what_the_step_drafts",
    "cuda_linear": "any_depth_and_any_address or rows_that_share_memory",
    "cuda_step": "argmax_of_one_long_row or the_depth_bound or pack_mask",
    "cuda_synthetic": "what_is_no_tree_is_left_out",
    "unpack_weight": "row_scales or some_rows",
}


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


def _columns(per_sm: int, more: int, target: Target) -> int:
    """Returns columns, some of the last block's missing."""
    sms = ops.device_limits(target.backend).num_sms if target.backend != "cpu" else 1
    return 64 * (per_sm * sms + more) - 8


def _linear(rows: int, per_sm: int, more: int, target: Target) -> dict[str, Any]:
    depth = 4160 if rows < 40 and per_sm == 0 else 192
    product = linear.LinearCell("small", rows, _columns(per_sm, more, target), depth)
    return {"status": linear.measure(product, target, NoTimer())["status"]}


def _packed(format: str, target: Target) -> dict[str, Any]:
    statuses = [
        linear.measure(
            linear.LinearCell("small", rows, _columns(1, 1, target), 512, format), target, NoTimer()
        )["status"]
        for rows in PACKED_ROWS
    ]
    return {"status": "ok" if set(statuses) == {"ok"} else "failed", "summary": str(statuses)}


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


def _product(rows: int, per_sm: int, more: int) -> tuple[str, Check]:
    return f"linear-m{rows}-{per_sm}-{more}", partial(_linear, rows, per_sm, more)


def products_that_hand_over() -> list[tuple[str, Check]]:
    """Like instances(True), of the linear layer."""
    return [_product(*LINEAR_HANDING_OVER)]


def operations() -> list[tuple[str, Check]]:
    """Calls of kernels that are no attention instance, and attention as the package chooses it."""
    found: list[tuple[str, Check]] = [
        (kind.replace("_", "-"), partial(_operation, kind)) for kind in OPERATIONS
    ]
    found += [_product(*cell) for cell in LINEAR]
    found += [(f"linear-{format}", partial(_packed, format)) for format in linear.PACKED_BITS]
    found += [(f"slots-{method}", partial(_slots, method)) for method in ("lookahead", "ngram")]
    found.append(("generic", partial(_attention, GENERIC)))
    found += [(cell.name, partial(_attention, cell)) for cell in ATTENTION]
    return [*found, ("bits", _bits), ("whole-step", _whole_step)]


def hands_over(row: Any) -> bool:
    """Do its warpgroups hand registers over? Those of 9.0 do where there are more than two, be it
    for two tiles of rows or to widen 8-bit K/V (kHandsOver of hopper_tile.h)."""
    return bool(row["family"] == "hopper" and row["threads"] > 2 * WARPGROUP)


def instances(handing_over: bool) -> list[tuple[str, Check]]:
    """The attention table: those that hand registers over between warpgroups come after everything
    that cannot hang there."""
    return [
        (row["name"], partial(check_instance, row))
        for row in ops.supported_attention()
        if hands_over(row) == handing_over
    ]


def run(target: Target) -> None:
    """Raises   ArithmeticError if a result is wrong."""
    open_backend(target)
    for name, check in [*operations(), *products_that_hand_over()]:
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
