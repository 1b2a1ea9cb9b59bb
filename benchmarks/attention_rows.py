"""T(rows) of the CPU speculative attention, beside its floors and torch's SDPA.

    OMP_WAIT_POLICY=PASSIVE python -m benchmarks.attention_rows [--dtype float32] [--threads 2]

One JSON line per (context, rows): milliseconds for all layers of one forward pass,
  ours_ms      specdec_ext.ops.step_attention on shuffled pages, tree mask for rows > 1
  sdpa_ms      torch SDPA with the same mask on K/V that was gathered beforehand (not timed)
  gather_ms    the gather that SDPA would need at each step with a paged cache
  bytes_ms     K/V bytes over the read rate of this machine, measured in the same run with the same
               number of threads (torch.sum over a buffer of the size of all the K/V)
  gflops       multiply-adds x 2 of our kernel over its time
The minimum of several repetitions is reported: the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

import torch

from specdec_ext import _core, ops


def best_ms(call: Callable[[], object], seconds: float) -> float:
    """Minimum time of a call in milliseconds, over at least three calls and `seconds`."""
    call()
    best = float("inf")
    end = time.perf_counter() + seconds
    count = 0
    while count < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        count += 1
    return best * 1e3


def measure(args: argparse.Namespace, context: int, rows: int) -> dict[str, object]:
    dtype = getattr(torch, args.dtype)
    layers, heads, kv_heads, head_dim = args.layers, args.heads, args.kv_heads, args.head_dim
    page_size = args.page_size
    rng = random.Random(0)
    num_pages = -(-(context + rows) // page_size)
    table = list(range(num_pages))
    rng.shuffle(table)
    size = (layers, num_pages, kv_heads, page_size, head_dim)
    k_pages = torch.randn(size).to(dtype)
    v_pages = torch.randn(size).to(dtype)
    q = torch.randn(rows, heads, head_dim).to(dtype)
    out = torch.empty_like(q)
    tree = rows <= 128
    parents = [-1] + [0 if i % 4 == 0 else i for i in range(rows - 1)] if tree else []
    plan = _core.make_step_plan(
        [[0] * rows], parents=[parents], kv_len=[context], page_table=[table]
    )
    scale = head_dim**-0.5

    def ours() -> None:
        for layer in range(layers):
            ops.step_attention(plan, layer, q, out, k_pages, v_pages, scale=scale)

    order = torch.tensor(table)

    def gather(pages: torch.Tensor) -> torch.Tensor:
        picked = pages[order].transpose(0, 1).reshape(kv_heads, -1, head_dim)
        return picked[None, :, : context + rows]

    dense = [(gather(k_pages[i]), gather(v_pages[i])) for i in range(layers)]
    mask = torch.ones(rows, context + rows, dtype=torch.bool)
    own = torch.zeros(rows, rows, dtype=torch.bool)
    for i in range(rows):
        if tree:
            own[i] = own[parents[i]] if i else own[i]
            own[i, i] = True
        else:
            own[i, : i + 1] = True
    mask[:, context:] = own
    q4 = q.transpose(0, 1)[None].contiguous()

    def sdpa() -> None:
        for k, v in dense:
            torch.nn.functional.scaled_dot_product_attention(
                q4, k, v, attn_mask=mask, scale=scale, enable_gqa=True
            )

    stream = torch.empty(2 * layers * kv_heads * (context + rows) * head_dim, dtype=dtype)
    stream.fill_(0.5)
    as_float = stream.view(torch.float32)
    flops = 4 * layers * heads * head_dim * (rows * context + int(own.sum()))
    ours_ms = best_ms(ours, args.seconds)
    return {
        "context": context,
        "rows": rows,
        "dtype": args.dtype,
        "threads": args.threads,
        "ours_ms": round(ours_ms, 3),
        "sdpa_ms": round(best_ms(sdpa, args.seconds), 3),
        "gather_ms": round(
            best_ms(
                lambda: [gather(pages[i]) for i in range(layers) for pages in (k_pages, v_pages)],
                args.seconds / 2,
            ),
            3,
        ),
        "bytes_ms": round(best_ms(lambda: as_float.sum(), args.seconds), 3),
        "gflops": round(flops / ours_ms / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 11, 16, 32, 64, 128])
    parser.add_argument("--seconds", type=float, default=0.4, help="per figure")
    args = parser.parse_args()
    ops.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for context in args.contexts:
        for rows in args.rows:
            print(json.dumps(measure(args, context, rows)), flush=True)


if __name__ == "__main__":
    main()
