"""Every kernel once on small inputs, checked: what runs under the sanitizer.

python -m benchmarks.gpu.small_set [--backend cuda]     prints one line per call
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import torch

from benchmarks.gpu import linear, step_ops
from benchmarks.gpu import problem as problems
from benchmarks.gpu.attention import count_differing, measure
from benchmarks.gpu.cells import AttentionCell, StepCell
from benchmarks.gpu.ours import open_backend
from benchmarks.gpu.run import Target
from benchmarks.gpu.timing import NoTimer

# Ragged pages, more rows than a tile, a split context, 8-bit K/V, a prompt.
ATTENTION = (
    AttentionCell(2, 5, 200, num_kv_heads=2, num_heads=8),
    AttentionCell(1, 70, 330, num_kv_heads=1, num_heads=2, page_size=16),
    AttentionCell(2, 5, 200, num_kv_heads=1, num_heads=4, kv_dtype="float8_e4m3fn"),
    AttentionCell(2, 5, 200, num_kv_heads=1, num_heads=4, kv_dtype="float8_e4m3fn", fp8_math=True),
    AttentionCell(1, 130, 0, num_kv_heads=1, num_heads=2),
)
STEP = StepCell("step", 2, 9, 80, 2, num_heads=4, num_kv_heads=2, vocab=1000)


def run(target: Target) -> None:
    """Raises   ArithmeticError if a result is wrong."""
    open_backend(target)
    pool = problems.RandomPool(target.device)
    for cell in ATTENTION:
        record = measure(cell, target, NoTimer(), pool, with_peers=False)
        print(f"{cell.name}: {record['status']}", flush=True)
    bits = count_differing(ATTENTION[0], target, pool)
    if bits["differing"]:
        raise ArithmeticError(f"{bits['differing']} elements differ from plain decoding")
    for kind in ("build_step", "append", "rope_append", "compact", "argmax", "sample", "accept"):
        op = dataclasses.replace(STEP, kind=kind)
        print(f"{op.name}: {step_ops.measure_op(op, target, NoTimer())['status']}", flush=True)
    for rows in (1, 12, 20, 40, 100):  # every tile
        product = linear.LinearCell("small", rows, 136, 4160 if rows < 40 else 192)
        print(f"{product.name}: {linear.measure(product, target, NoTimer())['status']}", flush=True)
    step = step_ops.Step(STEP, target, STEP.layers)
    step.whole()
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    if not bool(torch.isfinite(step.out).all()):
        raise ArithmeticError("a whole step gives no finite result")
    print("whole step: ok", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", default="cuda")
    args = parser.parse_args()
    device = torch.device("cuda" if args.backend == "cuda" else "cpu")
    run(Target(args.backend, device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
