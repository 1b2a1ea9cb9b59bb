"""How far is one forward pass from what the machine can do, and what do more rows cost?

T(rows) of the default model against floors measured in the same run: the weight bytes over a read
stream, and the floating-point work over the rate of torch's large matrix product in the same data
type. Two threads, context of 256 tokens, least of many passes.

    python -m benchmarks.step_cost [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, runners

ROWS = (1, 2, 4, 8, 11, 16, 32, 64, 84, 128)
CONTEXT = 256
PAGE = 32


def least(call: Callable[[], object], repeats: int) -> float:
    """Returns the least seconds of `repeats` calls after one to warm up."""
    call()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def read_bandwidth(repeats: int) -> float:
    """Returns bytes/s of the fastest plain read stream here: 512 MiB, reduced or multiplied."""
    matrix = torch.ones(8192, 16384)
    vector = torch.ones(16384)
    reads = (lambda: matrix.sum(), lambda: torch.mv(matrix, vector), lambda: matrix.max())
    return matrix.nbytes / min(least(read, repeats) for read in reads)


def flops_per_second(dtype: torch.dtype, repeats: int) -> float:
    """Returns the rate of torch's matrix product 2048 x 2048 x 2048."""
    a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    return 2 * 2048**3 / least(lambda: a @ b, repeats)


def measure(folder: Path, dtype: str, repeats: int) -> dict[str, Any]:
    """Returns T(rows) in ms, the floors and the ratios of one data type."""
    from specdec_ext import _core
    from specdec_ext.models import load_model

    model = load_model(folder, dtype=dtype, max_rows=max(ROWS))
    info = model.info
    num_pages = (CONTEXT + 128) // PAGE
    shape = (model.num_layers, num_pages, model.num_kv_heads, PAGE, model.head_dim)
    model.bind_cache(
        torch.zeros(shape, dtype=model.kv_dtype), torch.zeros(shape, dtype=model.kv_dtype)
    )
    bandwidth = read_bandwidth(repeats)
    rate = flops_per_second(getattr(torch, dtype), repeats)
    seconds = {}
    for rows in ROWS:
        plan = _core.make_step_plan(
            [list(range(10, 10 + rows))],
            kv_len=[CONTEXT],
            page_table=[list(range(num_pages))],
            needs_logits=False,
        )
        seconds[rows] = least(lambda p=plan: model.forward(p), repeats)
    # The stream is measured again: the lesser machine of the two moments would flatter us.
    bandwidth = max(bandwidth, read_bandwidth(repeats))
    read = info.weight_bytes / bandwidth
    work = 2 * info.weight_bytes / model.kv_dtype.itemsize
    floors = {rows: max(read, rows * work / rate) for rows in ROWS}
    return {
        "numerics": model.numerics,
        "impl": model.impl,
        "weight_bytes": info.weight_bytes,
        "read_gb_per_s": bandwidth / 1e9,
        "gemm_gflop_per_s": rate / 1e9,
        "ms": {str(rows): seconds[rows] * 1e3 for rows in ROWS},
        "floor_ms": {str(rows): floors[rows] * 1e3 for rows in ROWS},
        "over_floor": {str(rows): seconds[rows] / floors[rows] for rows in ROWS},
        "over_one_row": {str(rows): seconds[rows] / seconds[1] for rows in ROWS},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few passes; no file")
    args = parser.parse_args()
    folder, _ = runners.default_model(args.threads)
    environment = common.environment(args.threads)
    results = {dtype: measure(folder, dtype, 3 if args.quick else 20) for dtype in args.dtypes}
    rows: list[list[Any]] = []
    for dtype, r in results.items():
        rows.append([f"{dtype}, ms", *r["ms"].values()])
        rows.append([f"{dtype}, over the floor", *r["over_floor"].values()])
        rows.append([f"{dtype}, over one row", *r["over_one_row"].values()])
    table = common.markdown(["T(rows)", *ROWS], rows)
    print(table)
    if not args.quick:
        result = {
            "benchmark": "step_cost",
            "environment": environment,
            "model": "SmolLM2-135M-Instruct",
            "context": CONTEXT,
            "results": results,
        }
        common.write_result("step_cost", result, [table])
    return 0


if __name__ == "__main__":
    sys.exit(main())
