"""The stages that measure. The package has to be built: this imports it."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import (
    attention,
    cells,
    engine_cells,
    linear,
    model_step,
    peer_model,
    slot_ops,
    spec_step,
    step_ops,
    texts,
    timing,
)
from benchmarks.gpu import problem as problems
from benchmarks.gpu.ours import open_backend
from benchmarks.gpu.run import Run

Job = tuple[str, Callable[[], dict[str, Any]]]


def _timer(run: Run) -> timing.Timer:
    if run.emulated:
        return timing.NoTimer()
    return timing.GraphTimer(rounds=3 if run.quick else timing.ROUNDS)


def _bench(run: Run, stage: str, jobs: Sequence[Job]) -> None:
    for name, work in jobs:
        run.part(stage, name, work)
        gc.collect()
        if not run.emulated:
            torch.cuda.empty_cache()


def bench_kernel(run: Run) -> None:
    """Attention, the linear layer and the small operations, ours and the peers."""
    open_backend(run.target)
    timer = _timer(run)
    noted = run.store.data["stages"].get("bench-kernel", {})
    if isinstance(timer, timing.GraphTimer) and "ceilings" not in noted:
        run.store.note("bench-kernel", "ceilings", timing.ceilings(timer))
    pool = problems.RandomPool(run.target.device)
    every = cells.attention_cells()
    bits = attention.EXACT_CELLS
    small = cells.step_op_cells()
    products = linear.linear_cells()
    pools = cells.slot_cells()
    if run.quick:
        every, bits, small = cells.quick(every), bits[:3], small[:4]
        products = products[: len(linear.SHAPES)]
        pools = pools[:2]
    if run.emulated:
        every = cells.emulated(every)
        bits = cells.emulated(bits)[:2]
        small = list({cell.tiny().name: cell.tiny() for cell in small}.values())
        pools = list({cell.tiny().name: cell.tiny() for cell in pools}.values())
        products = [cell.tiny() for cell in products if cell.weight in ("qkv", "down")]
    jobs: list[Job] = [
        (f"bits-{cell.name}", partial(attention.count_differing, cell, run.target, pool))
        for cell in bits
    ]
    jobs += [(op.name, partial(step_ops.measure_op, op, run.target, timer)) for op in small]
    jobs += [(cell.name, partial(slot_ops.measure, cell, run.target, timer)) for cell in pools]
    jobs += [(cell.name, partial(linear.measure, cell, run.target, timer)) for cell in products]
    jobs += [
        (cell.name, partial(attention.measure, cell, run.target, timer, pool, not run.emulated))
        for cell in every
    ]
    _bench(run, "bench-kernel", jobs)


def bench_step(run: Run) -> None:
    """Whole steps without the model, with it, and through the engine."""
    open_backend(run.target)
    timer = _timer(run)
    every = [cell.tiny() if run.emulated else cell for cell in cells.step_cells()]
    chosen = every[:2] if run.quick else every
    jobs: list[Job] = [
        (cell.name, partial(step_ops.measure_step, cell, run.target, timer)) for cell in chosen
    ]
    _bench(run, "bench-step", jobs + _model_jobs(run, timer))


def _model_jobs(run: Run, timer: timing.Timer) -> list[Job]:
    if importlib.util.find_spec("transformers") is None:  # it reads configurations
        record = {"status": "unavailable", "summary": "transformers is not installed"}
        return [("model", lambda: record)]
    every = [cell.tiny() if run.emulated else cell for cell in engine_cells.model_cells()]
    every = list({cell.name: cell for cell in every}.values())
    chosen = every[:3] + every[-1:] if run.quick else every
    passes = [cell for cell in chosen if cell.kind == "model"]
    models = model_step.Models(run.target, max(cell.requests * cell.rows for cell in passes))
    short = timing.GraphTimer(timer.rounds, 2) if isinstance(timer, timing.GraphTimer) else timer

    jobs: list[Job] = [
        (cell.name, partial(model_step.measure_pass, cell, run.target, short, models))
        for cell in passes
    ]
    speculated = [
        cell.tiny() if run.emulated else cell for cell in engine_cells.speculation_cells()
    ]
    if run.quick or run.emulated:  # one of each method
        speculated = list({cell.method: cell for cell in reversed(speculated)}.values())

    def alone(measure: Callable[..., dict[str, Any]], cell: Any) -> dict[str, Any]:
        models.drop()
        return measure(cell, run.target)

    decodes = [cell for cell in chosen if cell.kind == "decode"]
    jobs += [(cell.name, partial(alone, model_step.measure_decode, cell)) for cell in decodes]
    jobs += [(cell.name, partial(alone, spec_step.measure, cell)) for cell in speculated]
    compared = [cell.tiny() if run.emulated else cell for cell in engine_cells.texts_cells()]
    jobs += [(cell.name, partial(alone, texts.measure, cell)) for cell in compared]
    peer = next(cell for cell in every if cell.kind == "model")
    jobs.append((f"peer-{peer.name}", partial(alone, peer_model.measure, peer)))
    return jobs
