"""What do M rows cost in our linear layers, and how far is that from the machine's limits?

All matrices of SmolLM2-135M (30 layers and the head), T(M) against two floors of the same run:
reading the same packed weights and doing nothing else, and the floating-point work at the rate of
torch's large matrix product. Peer: torch.nn.functional.linear on the same matrices. Least of the
rounds, because noise only adds.

    python -m benchmarks.linear_rows [--quick] [--threads 2]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import common

ROWS = (1, 2, 4, 8, 11, 16, 27, 32, 64, 84, 512)
HIDDEN, FFN, QKV, VOCAB, LAYERS = 576, 1536, 960, 49152, 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The head of a long block is run on this many rows only, as the decoder does.
HEAD_ROWS = 128


def seconds(call: Callable[[], object]) -> float:
    """Returns the seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def shapes() -> list[tuple[int, int]]:
    """Returns (N, K) of every matrix in the order of a forward pass."""
    layer = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN)]
    return layer * LAYERS + [(VOCAB, HIDDEN)]


def measure(dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Returns floors, T(M) of ours and of torch in ms, and the ratios, for one data type."""
    from specdec_ext import _core

    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes()]
    packed = [_core.PackedLinear(weight) for weight in weights]
    weight_bytes = sum(linear.weight_bytes for linear in packed)
    inner = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32

    def ours(rows: int) -> Callable[[], object]:
        calls = []
        for linear in packed:
            count = min(rows, HEAD_ROWS) if linear.out_features == VOCAB else rows
            # Rows a cache line further apart than K, as the decoder lays them out.
            wide = torch.randn(count, linear.in_features + 32, generator=generator).to(inner)
            x = wide[:, : linear.in_features]
            calls.append((linear, x, torch.empty(count, linear.out_features)))
        return lambda: [linear.run(x, out) for linear, x, out in calls]

    def torchs(rows: int) -> Callable[[], object]:
        calls = []
        for weight in weights:
            count = min(rows, HEAD_ROWS) if weight.shape[0] == VOCAB else rows
            calls.append((torch.randn(count, weight.shape[1]).to(dtype), weight))
        return lambda: [torch.nn.functional.linear(x, weight) for x, weight in calls]

    a, b = (torch.randn(2048, 2048, generator=generator).to(dtype) for _ in range(2))
    programs: dict[str, Callable[[], object]] = {
        "read": lambda: [linear.read() for linear in packed],
        "gemm": lambda: a @ b,
    }
    programs |= {f"ours {rows}": ours(rows) for rows in ROWS}
    programs |= {f"torch {rows}": torchs(rows) for rows in ROWS}
    timings = {name: (lambda call=call: seconds(call)) for name, call in programs.items()}
    with torch.inference_mode():
        results = common.interleave(timings, rounds + 1)
    least = {name: min(times[1:]) for name, times in results.items()}

    flops = {
        rows: sum(2.0 * n * k * (min(rows, HEAD_ROWS) if n == VOCAB else rows) for n, k in shapes())
        for rows in ROWS
    }
    rate = 2.0 * 2048**3 / least["gemm"]
    table = []
    for rows in ROWS:
        compute = flops[rows] / rate
        floor = max(least["read"], compute)
        table.append(
            {
                "rows": rows,
                "ms": least[f"ours {rows}"] * 1e3,
                "torch_ms": least[f"torch {rows}"] * 1e3,
                "compute_floor_ms": compute * 1e3,
                "over_floor": least[f"ours {rows}"] / floor,
                "over_one_row": least[f"ours {rows}"] / least["ours 1"],
                "speedup_over_torch": least[f"torch {rows}"] / least[f"ours {rows}"],
            }
        )
    return {
        "weight_bytes": weight_bytes,
        "read_ms": least["read"] * 1e3,
        "read_gb_per_s": weight_bytes / least["read"] / 1e9,
        "gemm_gflops": rate / 1e9,
        "rows": table,
    }


def render(dtype: str, result: dict[str, Any]) -> str:
    """Returns the markdown table of one data type."""
    header = ["rows", "ms", "torch ms", "compute floor ms", "/ floor", "/ T(1)", "torch / ours"]
    title = (
        f"{dtype}: {result['weight_bytes'] / 1e6:.0f} MB, read floor {result['read_ms']:.2f} ms "
        f"({result['read_gb_per_s']:.1f} GB/s), torch GEMM {result['gemm_gflops']:.0f} GFLOP/s"
    )
    return title + "\n\n" + common.markdown(header, [list(row.values()) for row in result["rows"]])


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, write nothing")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    args = parser.parse_args()
    common.set_threads(args.threads)
    result: dict[str, Any] = {"environment": common.environment(args.threads)}
    tables = []
    for dtype in args.dtype or DTYPES:
        result[dtype] = measure(DTYPES[dtype], 3 if args.quick else 10)
        tables.append(render(dtype, result[dtype]))
        print(tables[-1] + "\n")
    if not args.quick:
        common.write_result("linear_rows", result, tables)


if __name__ == "__main__":
    main()
