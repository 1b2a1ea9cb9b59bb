"""Tables of a result file: python -m benchmarks.gpu report FILE.json"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from benchmarks import common
from benchmarks.gpu.results import DONE

OURS = ("exact", "fast")


def geomean(values: Iterable[float]) -> float | None:
    """Returns the geometric mean, None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def measured(cells: dict[str, Any]) -> dict[str, Any]:
    """Returns the attention cells that have times."""
    return {
        name: cell
        for name, cell in cells.items()
        if cell.get("status") == "ok"
        and cell.get("programs", {}).get("exact", {}).get("us") is not None
    }


def best_peer(cell: dict[str, Any]) -> tuple[str, float] | None:
    """Returns name and microseconds of the fastest peer of a cell, None if none ran."""
    times = [
        (program["us"], name)
        for name, program in cell["programs"].items()
        if name not in OURS and program.get("us") is not None
    ]
    return (min(times)[1], min(times)[0]) if times else None


def peer_us(cell: dict[str, Any], name: str) -> float | None:
    us: float | None = cell["programs"].get(name, {}).get("us")
    return us


def targets(
    cells: dict[str, Any], small: dict[str, Any], ceilings: dict[str, float]
) -> list[list[Any]]:
    """Returns rows (target, figure, wanted, value) for what was measured."""
    found = measured(cells)
    rows: list[list[Any]] = []

    def of(group: str) -> dict[str, Any]:
        return {name: cell for name, cell in found.items() if group in cell["groups"]}

    def add(group: str, what: str, wanted: str, value: float | None) -> None:
        rows.append([group, what, wanted, "not measured" if value is None else value])

    def versus_peer(cell: dict[str, Any]) -> float | None:
        peer = best_peer(cell)
        return peer[1] / cell["programs"]["exact"]["us"] if peer else None

    for group, floor, peer in (("G1", "<= 1.35", ">= 1.3"), ("G3", "<= 9 us", ">= 1.3")):
        for name, cell in of(group).items():
            exact = cell["programs"]["exact"]
            if group == "G1":
                xqa = peer_us(cell, "flashinfer-xqa")
                add(group, f"{name}: time / floor", floor, exact["over_floor"])
                add(group, f"{name}: XQA / ours", ">= 2.0", xqa / exact["us"] if xqa else None)
            else:
                add(group, f"{name}: us", floor, exact["us"])
            add(group, f"{name}: fastest peer / ours", peer, versus_peer(cell))
    sweep = of("G2")
    ratios = [r for cell in sweep.values() if (r := versus_peer(cell)) is not None]
    add("G2", f"fastest peer / ours, geometric mean of {len(ratios)}", ">= 1.3", geomean(ratios))
    add("G2", "fastest peer / ours, worst cell", ">= 0.95", min(ratios, default=None))
    long = [c["programs"]["exact"]["over_floor"] for c in sweep.values() if c["floor_us"] > 20]
    add("G2", f"time / floor, {len(long)} cells above 20 us", "<= 1.4", geomean(long))
    for name, cell in of("G4").items():
        add("G4", f"{name}: time / floor", "<= 1.6", cell["programs"]["exact"]["over_floor"])
        add("G4", f"{name}: XQA / ours", ">= 1.3", versus_peer(cell))
    for name, cell in of("G5").items():
        rate = cell["programs"]["exact"]["gb_per_s"] * 1e9
        read = ceilings.get("read_bytes_per_s")
        add("G5", f"{name}: share of the read stream", ">= 0.92", rate / read if read else None)
    bits = [c["differing"] for c in cells.values() if c.get("exact") and "differing" in c]
    add("G6", f"differing elements in {len(bits)} cells", "0", sum(bits) if bits else None)
    costs = [
        c["programs"]["exact"]["us"] / c["programs"]["fast"]["us"]
        for c in found.values()
        if c["context"] >= 4096 and c["programs"].get("fast", {}).get("us")
    ]
    add("G6", "exact / fast, geometric mean", "<= 1.05", geomean(costs))
    add("G6", "exact / fast, worst cell", "<= 1.05", max(costs, default=None))
    prompts = [r for cell in of("prefill").values() if (r := versus_peer(cell)) is not None]
    add("prefill", "fastest peer / ours, worst", ">= 0.6", min(prompts, default=None))
    for name, cell in small.items():
        if cell.get("kind") == "compact":
            add("compact", f"{name}: us", "<= 8", cell.get("us"))
        if cell.get("method") and (cell["requests"], cell["context"]) == (32, 65536):
            short = small.get(name.replace("-ctx65536", "-ctx1024"), {}).get("us")
            add("G9", f"{name}: us", "<= 8", cell.get("us"))
            ratio = cell["us"] / short if cell.get("us") and short else None
            add("G9", f"{name}: against 1024 tokens", "flat", ratio)
    return rows


def step_targets(cells: dict[str, Any]) -> list[list[Any]]:
    """Returns rows (target, figure, wanted, value) of steps with the model."""
    us = {name: cell["us"] for name, cell in cells.items() if cell.get("us")}
    floor = {name: cell.get("floor_us") for name, cell in cells.items()}

    def ratio(of: str, to: str) -> float | str:
        return us[of] / us[to] if of in us and to in us else "not measured"

    def over_floor(name: str) -> float | str:
        return us[name] / floor[name] if name in us and floor.get(name) else "not measured"

    return [
        ["G7", "T(1) / floor, 1 request", "<= 1.15", over_floor("model-b1-m1")],
        ["G7", "T(84) / T(1), 1 request", "<= 1.12", ratio("model-b1-m84", "model-b1-m1")],
        ["G7", "T(27) / floor, 8 requests", "<= 1.35", over_floor("model-b8-m27")],
        *(
            ["exact", f"exact / fast, {b} x {m} rows", "<= 1.05",
             ratio(f"model-b{b}-m{m}-exact", f"model-b{b}-m{m}")]
            for b, m in ((1, 1), (1, 84), (8, 27))
        ),
        ["G7", "transformers, static cache, compiled / T(1)", ">= 1.3",
         ratio("peer-model-b1-m1", "model-b1-m1")],
        *speculation_targets(cells, us),
        *(
            ["texts", f"{name}: of {cell['prompts']} texts, differing without a near-tie", "0",
             cell["not_near_ties"]]
            for name, cell in cells.items()
            if cell.get("kind") == "texts" and "not_near_ties" in cell
        ),
    ]  # fmt: skip


def speculation_targets(cells: dict[str, Any], us: dict[str, float]) -> list[list[Any]]:
    """G8: time beside the model. G11: speedup over plain decoding, of what T(1) / T(rows) allows;
    all of it from this file."""
    rows: list[list[Any]] = []
    for name, cell in cells.items():
        if cell.get("kind") != "spec" or not cell.get("tokens_per_s"):
            continue
        requests = cell["requests"]
        parts = (cell.get("step_times") or {}).get("decode") or {}
        if parts.get("steps"):
            beside = (parts["draft"] + parts["accept"]) / parts["steps"] * 1e6
            wanted = {1: "<= 60", 32: "<= 120"}.get(requests, "")
            wanted = wanted if cell["method"] == "lookahead" else "<= 60 beside the network"
            rows.append(["G8", f"{name}: draft and accept, us", wanted, beside])
        plain = cells.get(f"decode-b{requests}-m1-ahead1-graphs", {}).get("us")
        one, many = (us.get(f"model-b{requests}-m{m}") for m in (1, cell["rows"]))
        if plain is None or one is None or many is None:
            continue
        speedup = cell["tokens_per_s"] * plain * 1e-6 / requests
        limit = cell["accepted_tokens_per_step"] * one / many
        share = {1: ">= 0.90", 8: ">= 0.75"}.get(requests, "")
        rows.append(["G11", f"{name}: speedup / limit", share, speedup / limit])
        rows.append(["G11", f"{name}: against plain decoding", ">= 0.98", speedup])
    return rows


def attention_table(cells: dict[str, Any]) -> str:
    rows: list[list[Any]] = []
    for name, cell in cells.items():
        if "programs" not in cell:
            continue
        if cell["status"] != "ok":
            rows.append([name, cell["floor_us"], cell["status"], *[""] * 5])
            continue
        exact, fast = (cell["programs"][mode] for mode in OURS)
        peer = best_peer(cell)
        rows.append(
            [
                name,
                cell["floor_us"],
                _or_blank(exact["us"]),
                _or_blank(fast["us"]),
                _or_blank(exact.get("over_floor")),
                _or_blank(exact.get("gb_per_s")),
                _or_blank(exact.get("tflop_per_s")),
                f"{peer[0]} {peer[1]:.1f}" if peer else "",
            ]
        )
    head = ["cell", "floor, us", "exact, us", "fast, us", "exact / floor", "GB/s", "TFLOP/s"]
    return common.markdown([*head, "fastest peer, us"], rows)


def _or_blank(value: Any) -> Any:
    return "" if value is None else value


def small_table(cells: dict[str, Any]) -> str:
    rows = [
        [name, cell["status"], _or_blank(cell.get("floor_us")), _or_blank(cell.get("us"))]
        for name, cell in cells.items()
        if "programs" not in cell and "differing" not in cell
    ]
    return common.markdown(["cell", "status", "floor, us", "us"], rows)


def status_table(cells: dict[str, Any]) -> str:
    rows = [
        [name, cell["status"], cell.get("seconds", ""), cell.get("summary", "")]
        for name, cell in cells.items()
    ]
    return common.markdown(["part", "status", "seconds", "result"], rows)


def page(data: dict[str, Any]) -> str:
    """Returns the markdown of a result file."""
    env = data["environment"]
    changes = {True: ", with uncommitted changes", None: ", changes unknown", False: ""}
    parts = [
        f"# {env['device']}, {env['date'][:10]}, {env['commit']}{changes[env['dirty']]}",
    ]
    if data["emulated"]:
        parts.append("**Emulated on a CPU: that the stages run is all this shows. No times.**")
    versions = ", ".join(f"{key} {value}" for key, value in env["versions"].items() if value)
    parts.append(f"nvcc {env['nvcc']}, {versions}")
    stages = data["stages"]
    parts += unfinished(stages)
    for stage, entry in stages.items():
        if data["emulated"] or not stage.startswith("bench"):
            parts += [f"## {stage}", status_table(entry["cells"])]
    if not data["emulated"]:
        parts += measurements(stages)
    return "\n\n".join(parts) + "\n"


def unfinished(stages: dict[str, Any]) -> list[str]:
    """Returns the section of what did not end well, nothing if there is none."""
    rows = [
        [stage, name, cell["status"], cell.get("summary") or cell.get("error", "")]
        for stage, entry in stages.items()
        for name, cell in entry["cells"].items()
        if cell["status"] not in DONE
    ]
    header = ["stage", "part", "status", "why"]
    return ["## Not done", common.markdown(header, rows)] if rows else []


def measurements(stages: dict[str, Any]) -> list[str]:
    """Returns the sections of the stages that measure."""
    parts: list[str] = []
    bench = stages.get("bench-kernel")
    if bench:
        cells = dict(bench["cells"])
        ceilings = cells.pop("ceilings", {}).get("ceilings", {})
        small = {name: cell for name, cell in cells.items() if "kind" in cell}
        header = ["target", "figure", "wanted", "measured"]
        parts += ["## Targets", common.markdown(header, targets(cells, small, ceilings))]
        known = ", ".join(f"{key} {value:.4g}" for key, value in ceilings.items())
        parts.append(f"Ceilings of this run: {known or 'not measured'}.")
        parts += ["## Attention", attention_table(cells)]
        parts += ["## Small operations", small_table(cells)]
        bits = {name: cell for name, cell in cells.items() if "differing" in cell}
        rows = [[n, c.get("elements", ""), c["differing"]] for n, c in bits.items()]
        parts += ["## Bits", common.markdown(["cell", "elements", "differing"], rows)]
    if "bench-step" in stages:
        header = ["target", "figure", "wanted", "measured"]
        parts += [
            "## Targets of a step with its model",
            common.markdown(header, step_targets(stages["bench-step"]["cells"])),
            "## Whole steps, without the model and with it",
            small_table(stages["bench-step"]["cells"]),
        ]
    return parts
