"""What does drawing a token from a row of scores cost on the CPU?

Rows whose probabilities fall with the rank r as r^-1.1, in random order of ids, drawn from by
common laws, eight rows per call, one thread; beside it torch doing the same: softmax and
multinomial, with top_k by topk and top_p by a sort, as transformers' processors do.

    python -m benchmarks.sampling_rows [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import common

ROWS = 8
VOCABS = (32_000, 49_152, 152_064)
LAWS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "temperature 0.6, top_k 20, top_p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
}


def rows_of_scores(vocab: int) -> Any:
    """Returns float32 [ROWS, vocab]."""
    import torch

    generator = torch.Generator().manual_seed(vocab)
    ranks = torch.arange(1, vocab + 1, dtype=torch.float64)
    scores = (-1.1 * ranks.log()).float()
    return torch.stack([scores[torch.randperm(vocab, generator=generator)] for _ in range(ROWS)])


def ours(scores: Any, law: dict[str, Any]) -> Callable[[], Any]:
    import torch

    from specdec_ext import ops

    count = len(scores)
    laws = ops.SamplingLaws(
        temperature=torch.full((count,), law.get("temperature", 1.0)),
        top_k=torch.full((count,), law.get("top_k", 0), dtype=torch.int32),
        top_p=torch.full((count,), law.get("top_p", 1.0)),
        min_p=torch.full((count,), law.get("min_p", 0.0)),
        seed=torch.arange(count, dtype=torch.int64),
    )
    starts = torch.arange(count + 1, dtype=torch.int32)
    positions = torch.arange(count, dtype=torch.int32)
    out = torch.empty(count, dtype=torch.int32)

    def draw() -> Any:
        positions.add_(1)
        return ops.sample_rows(scores, starts, positions, laws, out=out)

    return draw


def torchs(scores: Any, law: dict[str, Any]) -> Callable[[], Any]:
    import torch

    def draw() -> Any:
        cut = scores / law.get("temperature", 1.0)
        if "top_k" in law:
            least = cut.topk(law["top_k"]).values[..., -1:]
            cut = cut.masked_fill(cut < least, -torch.inf)
        if "top_p" in law:
            ordered, ids = cut.sort(descending=False)
            below = ordered.softmax(-1).cumsum(-1) <= 1.0 - law["top_p"]
            below[..., -1] = False
            cut = cut.masked_fill(below.scatter(1, ids, below), -torch.inf)
        probs = cut.softmax(-1)
        if "min_p" in law:
            probs = probs.masked_fill(probs < law["min_p"] * probs.amax(-1, keepdim=True), 0.0)
        return probs.multinomial(1)

    return draw


def least_us(draw: Callable[[], Any], calls: int) -> float:
    """Returns the least microseconds per row."""
    best = float("inf")
    for _ in range(calls):
        started = time.perf_counter()
        draw()
        best = min(best, time.perf_counter() - started)
    return best / ROWS * 1e6


def table_of(result: dict[str, Any]) -> str:
    header = ["vocabulary", "law", "us per row", "torch, us", "torch / ours"]
    rows = [
        [r["vocab"], r["law"], r["us"], r["torch_us"], r["torch_us"] / r["us"]]
        for r in result["results"]
    ]
    return common.markdown(header, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer calls; no file")
    args = parser.parse_args()
    common.set_threads(1)
    environment = common.environment(1)
    calls = 20 if args.quick else 200
    results = []
    for vocab in VOCABS:
        scores = rows_of_scores(vocab)
        width = str(scores.dtype).removeprefix("torch.")
        for name, law in LAWS.items():
            us, torch_us = (least_us(how(scores, law), calls) for how in (ours, torchs))
            results.append({"vocab": vocab, "law": name, "us": us, "torch_us": torch_us})
    result = {
        "benchmark": "sampling_rows",
        "environment": environment,
        "dtype": width,
        "rows": ROWS,
        "results": results,
    }
    table = table_of(result)
    print(table)
    if not args.quick:
        common.write_result("sampling_rows", result, [table])
    return 0


if __name__ == "__main__":
    sys.exit(main())
