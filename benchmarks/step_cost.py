"""How far is one forward pass from the read of its weights, and what do more rows cost?

T(rows) of the default model in several widths against a read of its weights in the same memory.
Read and passes take turns, and a ratio is one of a turn: the memory of a shared machine changes its
speed by the minute. Context of 256 tokens.

    python -m benchmarks.step_cost [--widths ...] [--turns 40] [--quick]
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import common, runners

ROWS = (1, 2, 4, 7, 11, 16, 32, 64, 84, 128)
CONTEXT = 256
PAGE = 32
# Width -> what the model is loaded from ("folder", "gguf"), and how.
WIDTHS: dict[str, tuple[str, dict[str, str]]] = {
    "float32": ("folder", {"dtype": "float32"}),
    "bfloat16": ("folder", {"dtype": "bfloat16"}),
    "int8": ("folder", {"dtype": "bfloat16", "quantization": "int8"}),
    "q4_1": ("gguf", {}),
}


def open_model(width: str, threads: int) -> Any:
    """The model with room for one request."""
    from specdec_ext.models import load_model
    from specdec_ext.models.default import find_default_gguf

    kind, options = WIDTHS[width]
    path = runners.default_model(threads)[0] if kind == "folder" else find_default_gguf()
    model: Any = load_model(path, max_rows=max(ROWS), **options)
    num_pages = (CONTEXT + max(ROWS)) // PAGE
    shape = (model.num_layers, num_pages, model.num_kv_heads, PAGE, model.head_dim)
    model.bind_cache(
        torch.zeros(shape, dtype=model.kv_dtype), torch.zeros(shape, dtype=model.kv_dtype)
    )
    return model


def passes_of(model: Any) -> dict[str, Callable[[], object]]:
    """A pass of each number of rows, and a read of what a pass reads of the weights."""
    from specdec_ext import _core

    num_pages = (CONTEXT + max(ROWS)) // PAGE
    passes: dict[str, Callable[[], object]] = {"read": model.read_weights}
    for rows in ROWS:
        plan = _core.make_step_plan(
            [list(range(10, 10 + rows))],
            kv_len=[CONTEXT],
            page_table=[list(range(num_pages))],
            needs_logits=False,
        )
        passes[str(rows)] = functools.partial(model.forward, plan)
    return passes


def seconds_of(call: Callable[[], object]) -> float:
    """What the second call takes; the first brings what others have driven out of the caches."""
    call()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(width: str, turns: int, threads: int) -> dict[str, Any]:
    """T(rows) in ms, medians over the turns, and the ratios inside a turn."""
    model = open_model(width, threads)
    passes = passes_of(model)
    for call in passes.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(turns):
        for name in list(passes)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(seconds_of(passes[name]))

    def over(name: str, base: str) -> float:
        pairs = zip(seconds[name], seconds[base], strict=True)
        return common.median([a / b for a, b in pairs])

    rows = [name for name in passes if name != "read"]
    return {
        "dtype": common.width_of(model),
        "numerics": model.numerics,
        "impl": model.impl,
        "weight_bytes": model.info.weight_bytes,
        "read_ms": common.median(seconds["read"]) * 1e3,
        "ms": {name: common.median(seconds[name]) * 1e3 for name in rows},
        "over_read": {name: over(name, "read") for name in rows},
        "over_one_row": {name: over(name, "1") for name in rows},
    }


def table_of(results: dict[str, Any]) -> str:
    """The markdown, three lines for each width."""
    rows: list[list[Any]] = []
    for width, r in results.items():
        rows.append([f"{width}, ms", r["read_ms"], *r["ms"].values()])
        rows.append([f"{width}, over the read", 1.0, *r["over_read"].values()])
        rows.append([f"{width}, over one row", "", *r["over_one_row"].values()])
    return common.markdown(["rows of one pass", "read alone", *ROWS], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", nargs="+", default=list(WIDTHS), choices=WIDTHS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="two turns; no file")
    args = parser.parse_args()
    common.set_threads(args.threads)
    environment = common.environment(args.threads)
    turns = 2 if args.quick else args.turns
    results = {width: measure(width, turns, args.threads) for width in args.widths}
    table = table_of(results)
    print(table)
    if not args.quick:
        result = {
            "benchmark": "step_cost", "environment": environment, "context": CONTEXT,
            "model": "SmolLM2-135M-Instruct", "turns": turns, "results": results,
        }  # fmt: skip
        common.write_result("step_cost", result, [table])
    return 0


if __name__ == "__main__":
    sys.exit(main())
