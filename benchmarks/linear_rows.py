"""What do M rows cost in our linear layers, and how far is that from the machine's limits?

All matrices of SmolLM2-135M (30 layers and the head), T(M) against two floors of the same run:
reading the same packed weights and doing nothing else, and the floating-point work at the rate of
torch's large matrix product. Peer: torch.nn.functional.linear on the same matrices. Least of the
rounds, because noise only adds.

    python -m benchmarks.linear_rows [--quick] [--threads 2] [--processor-time] [--fast]

On a machine that others use, too, --processor-time with one thread compares what calls cost.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks import common

ROWS = (1, 2, 4, 7, 11, 16, 27, 32, 64, 84, 512)
HIDDEN, FFN, QKV, VOCAB, LAYERS = 576, 1536, 960, 49152, 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Block formats: elements and bytes of a block, where its scales begin (float32 in f8_g, else
# float16). The head is q8_0, as in most files, but with f8_g its own.
FORMATS = {
    "q8_0": (32, 34, (0,)), "q4_0": (32, 18, (0,)), "q4_1": (32, 20, (0, 2)),
    "q4_k": (256, 144, (0, 2)), "q6_k": (256, 210, (208,)), "f8_g": (64, 68, (0,)),
}  # fmt: skip
# The head of a long block is run on this many rows only, as the decoder does.
HEAD_ROWS = 128


def seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Returns the seconds of one call."""
    started = clock()
    call()
    return clock() - started


def shapes() -> list[tuple[int, int]]:
    """Returns (N, K) of every matrix in the order of a forward pass."""
    layer = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN)]
    return layer * LAYERS + [(VOCAB, HIDDEN)]


def random_blocks(name: str, n: int, k: int) -> tuple[np.ndarray, str]:
    """Returns a weight [N, K] of random codes; q8_0 where K is not in whole blocks, and, but for
    f8_g, where N is V."""
    if k % FORMATS[name][0] or (n == VOCAB and name != "f8_g"):
        name = "q8_0"
    elements, size, scales = FORMATS[name]
    blocks = np.random.default_rng(0).integers(0, 256, (n, k // elements, size), dtype=np.uint8)
    if name == "f8_g":
        blocks[blocks & 0x7F == 0x7F] = 0  # NaN
    scale = np.array([0.01], np.float32 if name == "f8_g" else np.float16).view(np.uint8)
    for at in scales:
        blocks[..., at : at + len(scale)] = scale
    return blocks.reshape(n, -1), name


def measure(
    name: str, rounds: int, clock: Callable[[], float], *, fast: bool = False
) -> dict[str, Any]:
    """Returns floors, T(M) of ours and of torch in ms, and the ratios, for one type of weights.
    torch's peer of a block format is its product in bfloat16. fast: as with numerics="fast"."""
    from specdec_ext import _core

    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES.get(name, torch.bfloat16)
    weights = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes()]
    if name in FORMATS:
        packed = [_core.PackedLinear(random_blocks(name, *shape)) for shape in shapes()]
    else:
        packed = [_core.PackedLinear(weight) for weight in weights]
    weight_bytes = sum(linear.weight_bytes for linear in packed)
    inner = torch.bfloat16 if name == "bfloat16" else torch.float32

    def ours(rows: int) -> Callable[[], object]:
        calls = []
        for linear in packed:
            count = min(rows, HEAD_ROWS) if linear.out_features == VOCAB else rows
            # Rows a cache line further apart than K, as the decoder lays them out.
            wide = torch.randn(count, linear.in_features + 32, generator=generator).to(inner)
            x = wide[:, : linear.in_features]
            calls.append((linear, x, torch.empty(count, linear.out_features)))
        return lambda: [linear.run(x, out, fast) for linear, x, out in calls]

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
    timings = {what: (lambda call=call: seconds(call, clock)) for what, call in programs.items()}
    with torch.inference_mode():
        results = common.interleave(timings, rounds + 1)
    least = {what: min(times[1:]) for what, times in results.items()}

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
    """Returns the markdown table of one type of weights."""
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
    parser.add_argument("--dtype", choices=[*DTYPES, *FORMATS], action="append")
    parser.add_argument("--processor-time", action="store_true", help="instead of the wall clock's")
    parser.add_argument("--fast", action="store_true", help='products of numerics="fast"')
    args = parser.parse_args()
    clock = time.process_time if args.processor_time else time.perf_counter
    common.set_threads(args.threads)
    result: dict[str, Any] = {"environment": common.environment(args.threads)}
    result["clock"] = "processor" if args.processor_time else "wall"
    result["numerics"] = "fast" if args.fast else "exact"
    tables = []
    for dtype in args.dtype or [*DTYPES, *FORMATS]:
        result[dtype] = measure(dtype, 3 if args.quick else 10, clock, fast=args.fast)
        tables.append(render(f"{dtype} ({result['numerics']})", result[dtype]))
        print(tables[-1] + "\n")
    if not args.quick:
        common.write_result("linear_rows_fast" if args.fast else "linear_rows", result, tables)


if __name__ == "__main__":
    main()
