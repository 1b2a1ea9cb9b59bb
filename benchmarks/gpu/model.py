"""Predicted device times of the cells, from bytes, the planner's dealing and the machine code.

    python -m benchmarks.gpu.model [EXPR]             the targets, or cells that match EXPR
    python -m benchmarks.gpu.model [EXPR] FILE.json   beside what a result file measured
    python -m benchmarks.gpu.model --fusions          what it would save to join kernels
    python -m benchmarks.gpu.model --prompts          prompts with packed weights, two ways

docs/gpu.md holds the second table, with the newest result file, and the last (`--write` renews
both): no other text of the repository gives a time for a GPU that was not measured.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.gpu import cells, linear, model_fusions, model_prompts
from benchmarks.gpu.engine_cells import model_cells
from benchmarks.gpu.machine import Device, Prediction
from benchmarks.gpu.model_attention import attention
from benchmarks.gpu.model_ops import linear_cell, model_pass, step_op

FAR = 0.25  # a prediction that is off by more than this share of the measurement is listed
PAGE = common.ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- python -m benchmarks.gpu.model --write -->", "<!-- end of the predictions -->"
FUSIONS, FUSIONS_END = (
    "<!-- python -m benchmarks.gpu.model --fusions -->",
    "<!-- end of fusions -->",
)
PROMPTS, PROMPTS_END = (
    "<!-- python -m benchmarks.gpu.model --prompts -->",
    "<!-- end of prompts -->",
)


def modelled() -> dict[str, Callable[[Device], Prediction]]:
    """Every cell that has a model, by name, targets first. Slots have none: their time is latency
    of dependent accesses, which nothing here counts."""
    found: dict[str, Callable[[Device], Prediction]] = {}
    for cell in cells.attention_cells():
        if not cell.is_prompt:
            found[cell.name] = partial(attention, cell)
    for op in cells.step_op_cells():
        found[op.name] = partial(step_op, op)
    for product in linear.linear_cells():
        found[product.name] = partial(linear_cell, product)
    for model in model_cells():
        if model.kind == "model" and model.numerics == "exact":
            found[model.name] = partial(model_pass, model)
    return found


# What docs/gpu.md prints: the targets that a time decides, and the cells of the review.
TARGETS = (
    "attn-b8-m64-g4-ctx16384",
    "attn-b1-m27-g4-ctx2048",
    "attn-b8-m64-g4-ctx16384-kv8-math8",
    "attn-b8-m64-g4-ctx16384-kv8",
    "attn-b32-m1-g4-ctx16384",
    "attn-b8-m84-g4-ctx16384",
    "attn-b32-m64-g4-ctx16384",
    "attn-b8-m64-g8-ctx16384",
    "compact-b8-m64",
    "rope-append-b8-m64",
    "argmax-b1-m27",
    "sample-b1-m64",
    "sample-b8-m64",
    "match-b1-m64",
    "match-b8-m64",
    "accept-b1-m64",
    "accept-b8-m64",
    "linear-qkv-m1",
    "linear-gate-up-m1",
    "linear-qkv-m84",
    "linear-gate-up-m84",
    "linear-down-m84",
    "linear-head-m84",
    "model-b1-m1-exact",
    "model-b1-m84-exact",
    "model-b8-m27-exact",
)

# What was predicted of the kernels of commit 5603eb1, the first that this program was for. Cells
# that came later have none.
BEFORE_US = {
    "attn-b8-m64-g4-ctx16384": 232,
    "attn-b1-m27-g4-ctx2048": 17.4,
    "attn-b8-m64-g4-ctx16384-kv8-math8": 140,
    "attn-b8-m64-g4-ctx16384-kv8": 319,
    "attn-b32-m1-g4-ctx16384": 511,
    "attn-b8-m84-g4-ctx16384": 417,
    "attn-b32-m64-g4-ctx16384": 1052,
    "attn-b8-m64-g8-ctx16384": 228,
    "compact-b8-m64": 5.4,
    "rope-append-b8-m64": 3.5,
    "argmax-b1-m27": 8.2,
    "sample-b8-m64": 155,
    "accept-b8-m64": 208,
    "linear-qkv-m1": 12.7,
    "linear-qkv-m84": 33,
    "linear-gate-up-m84": 113,
    "model-b1-m1-exact": 3992,
    "model-b1-m84-exact": 7918,
    "model-b8-m27-exact": 15134,
}


def measured_us(data: Mapping[str, Any]) -> dict[str, float]:
    """Returns the microseconds of a result file by cell; of attention in exact mode."""
    found = {}
    for stage in data["stages"].values():
        for name, cell in stage["cells"].items():
            us = cell.get("programs", {}).get("exact", {}).get("us") or cell.get("us")
            if us is not None:
                found[name] = float(us)
    return found


def newest(folder: Path = common.RESULTS) -> dict[str, tuple[float, str]]:
    """Returns by cell the microseconds and the name of the newest result file of an H200 that has
    it: an H200 is what is predicted."""
    found: dict[str, tuple[str, float, str]] = {}
    for path in folder.glob("h200-*.json"):
        data = json.loads(path.read_text())
        if data.get("benchmark") != "gpu":
            continue
        times = {
            name: cell.get("measured", "")
            for stage in data["stages"].values()
            for name, cell in stage["cells"].items()
        }
        for name, us in measured_us(data).items():
            found[name] = max(found.get(name, ("", 0.0, "")), (times[name], us, path.name))
    return {name: (us, file) for name, (_, us, file) in found.items()}


def table(predictions: Sequence[Prediction], measured: Mapping[str, float] | None = None) -> str:
    """Returns the markdown of predictions beside floors and the first predictions, and beside what
    was measured."""
    rows = []
    for p in predictions:
        before = BEFORE_US.get(p.cell)
        row: list[Any] = [p.cell, _short(p.floor_us), "" if before is None else _short(before)]
        row += [_short(p.us), f"{p.us / p.floor_us:.2f}", p.bound]
        if measured is not None:
            us = measured.get(p.cell)
            row += ["" if us is None else _short(us), "" if us is None else f"{p.us / us:.2f}"]
        rows.append(row)
    head = ["cell", "floor, us", "before, us", "predicted, us", "/ floor"]
    head.append("longest kernel and what bounds it")
    if measured is not None:
        head += ["measured, us", "predicted / measured"]
    return common.markdown(head, rows)


def _short(us: float) -> str:
    return f"{us:.0f}" if us >= 20 else f"{us:.1f}"


def far(predictions: Sequence[Prediction], measured: Mapping[str, float]) -> list[str]:
    """Returns the cells whose prediction is more than a quarter of the measurement off."""
    return [
        f"{p.cell}: predicted {_short(p.us)} us, measured {_short(measured[p.cell])} us"
        for p in predictions
        if p.cell in measured and abs(p.us - measured[p.cell]) > FAR * measured[p.cell]
    ]


def predict(pattern: str = "", device: Device | None = None) -> list[Prediction]:
    """Returns the predictions of the targets, or of all cells that match an expression."""
    every = modelled()
    names = [name for name in every if re.search(pattern, name)] if pattern else TARGETS
    return [every[name](device or Device()) for name in names]


def page(text: str) -> str:
    """Returns docs/gpu.md with the tables of today's predictions."""
    text = _between(text, BEGIN, END, beside_measured())
    text = _between(text, FUSIONS, FUSIONS_END, model_fusions.table(model_fusions.fusions()))
    return _between(text, PROMPTS, PROMPTS_END, model_prompts.table())


def beside_measured() -> str:
    """Returns the table of the targets beside what was measured last, and in which files."""
    predictions, found = predict(), newest()
    here = {p.cell: found[p.cell] for p in predictions if p.cell in found}
    files = ", ".join(f"`{name}`" for name in sorted({file for _, file in here.values()}))
    measured = {cell: us for cell, (us, _) in here.items()}
    return f"Measured, each cell where it is newest: {files}\n\n{table(predictions, measured)}"


def _between(text: str, begin: str, end: str, inserted: str) -> str:
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{inserted}\n\n{end}{rest.split(end)[1]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.model")
    parser.add_argument("cells", nargs="?", default="", help="an expression; none: the targets")
    parser.add_argument("file", nargs="?", type=Path, help="a result file of a GPU")
    parser.add_argument("--write", action="store_true", help=f"renew the tables of {PAGE.name}")
    parser.add_argument("--fusions", action="store_true", help="what joining kernels would save")
    parser.add_argument("--prompts", action="store_true", help="prompts with packed weights")
    args = parser.parse_args(argv)
    if args.write:
        PAGE.write_text(page(PAGE.read_text()))
        return 0
    if args.fusions:
        print(model_fusions.table(model_fusions.fusions()))
        return 0
    if args.prompts:
        print(model_prompts.table())
        return 0
    if args.file is None and args.cells.endswith(".json"):
        args.cells, args.file = "", Path(args.cells)
    predictions = predict(args.cells)
    if args.file is None:
        print(table(predictions))
        return 0
    data = json.loads(args.file.read_text())
    if data.get("emulated"):
        parser.error(f"{args.file.name} was emulated: it holds no times")
    measured = measured_us(data)
    print(table(predictions, measured))
    listed = far(predictions, measured)
    print(f"\nMore than {FAR:.0%} off: {len(listed)}" + "".join(f"\n- {line}" for line in listed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
