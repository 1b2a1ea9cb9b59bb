"""The stages that measure, as lists of parts. The package has to be built: this imports it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
from benchmarks.gpu.run import Target
from benchmarks.gpu.stages import limit, settle
from benchmarks.gpu.supervise import LIMIT_S, Part

MODEL_S = 120.0  # an 8B-shaped model is made first
PEERS_S = 240.0  # FlashInfer compiles a module per shape, FlexAttention one per mask
TEXTS_S = 400.0

Measure = Callable[[Target, timing.Timer], dict[str, Any]]


def _timed(measure: Measure, target: Target, rounds: int, launches: int) -> dict[str, Any]:
    """A part's work, in its own process."""
    open_backend(target)
    timer: timing.Timer = timing.NoTimer()
    if not target.emulated:
        timer = timing.GraphTimer(rounds, launches)
    record = measure(target, timer)
    settle(target)
    return record


def _ceilings(target: Target, timer: timing.Timer) -> dict[str, Any]:
    assert isinstance(timer, timing.GraphTimer)
    return {"status": "ok", "ceilings": timing.ceilings(timer)}


def _sized(every: Sequence[Any], target: Target) -> list[Any]:
    """The cells, or emulated one tiny cell for each name."""
    if target.emulated:
        every = [cell.tiny() for cell in every]
    return list({cell.name: cell for cell in every}.values())


def bench_kernel(target: Target, quick: bool, with_peers: bool = True) -> list[Part]:
    """Attention, the linear layer and the small operations, ours and the peers."""
    with_peers = with_peers and not target.emulated
    every = cells.attention_cells()
    bits = attention.EXACT_CELLS
    small = cells.step_op_cells()
    products = linear.linear_cells()
    pools = cells.slot_cells()
    if quick:
        every, bits, small = cells.quick(every), bits[:3], small[:4]
        products = products[: len(linear.SHAPES)]
        pools = pools[:2]
    if target.emulated:
        every = cells.emulated(every)
        bits = cells.emulated(bits)[:2]
        small, pools = _sized(small, target), _sized(pools, target)
        products = [cell.tiny() for cell in products if cell.weight in ("qkv", "down")]
    rounds = 3 if quick else timing.ROUNDS

    def part(name: str, measure: Measure, seconds: float = LIMIT_S) -> Part:
        work = partial(_timed, measure, target, rounds, timing.LAUNCHES)
        return Part("bench-kernel", name, work, limit(target, seconds))

    def pool() -> problems.RandomPool:
        return problems.RandomPool(target.device)

    found = [] if target.emulated else [part("ceilings", _ceilings)]
    for cell in every:
        peers = with_peers and (
            cell.is_prompt or cell.name in cells.PEER_CELLS | cells.TORCH_PEER_CELLS
        )

        def attend(
            t: Target, timer: timing.Timer, cell: Any = cell, peers: bool = peers
        ) -> dict[str, Any]:
            return attention.measure(cell, t, timer, pool(), peers)

        found.append(part(cell.name, attend, PEERS_S if peers else LIMIT_S))
    for cell in bits:

        def differ(t: Target, _: timing.Timer, cell: Any = cell) -> dict[str, Any]:
            return attention.count_differing(cell, t, pool())

        found.append(part(f"bits-{cell.name}", differ))
    found += [part(op.name, partial(step_ops.measure_op, op)) for op in small]
    found += [part(cell.name, partial(slot_ops.measure, cell)) for cell in pools]
    found += [part(cell.name, partial(linear.measure, cell)) for cell in products]
    return found


def bench_step(target: Target, quick: bool) -> list[Part]:
    """Whole steps without the model, with it, and through the engine."""
    every = _sized(cells.step_cells(), target)
    rounds = 3 if quick else timing.ROUNDS

    def part(
        name: str, measure: Measure, seconds: float = LIMIT_S, launches: int = timing.LAUNCHES
    ) -> Part:
        work = partial(_timed, measure, target, rounds, launches)
        return Part("bench-step", name, work, limit(target, seconds))

    found = [
        part(cell.name, partial(step_ops.measure_step, cell))
        for cell in (every[:2] if quick else every)
    ]
    return found + _model_parts(target, quick, part)


def _model_parts(target: Target, quick: bool, part: Callable[..., Part]) -> list[Part]:
    if importlib.util.find_spec("transformers") is None:  # it reads configurations
        record = {"status": "unavailable", "summary": "transformers is not installed"}
        return [part("model", lambda _target, _timer: record)]

    every = _sized(engine_cells.model_cells(), target)
    chosen = every[:3] + every[-1:] if quick else every
    speculated = _sized(engine_cells.speculation_cells(), target)
    if quick or target.emulated:  # one of each method
        speculated = list({cell.method: cell for cell in reversed(speculated)}.values())

    def one_pass(cell: Any) -> Measure:
        def measure(t: Target, timer: timing.Timer) -> dict[str, Any]:
            models = model_step.Models(t, cell.requests * cell.rows)
            return model_step.measure_pass(cell, t, timer, models)

        return measure

    def untimed(measure: Callable[..., dict[str, Any]], cell: Any) -> Measure:
        return lambda t, _: measure(cell, t)

    passes = [cell for cell in chosen if cell.kind == "model"]
    decodes = [cell for cell in chosen if cell.kind == "decode"]
    found = [part(cell.name, one_pass(cell), MODEL_S, launches=2) for cell in passes]
    found += [part(c.name, untimed(model_step.measure_decode, c), MODEL_S) for c in decodes]
    found += [part(c.name, untimed(spec_step.measure, c), MODEL_S) for c in speculated]
    compared = _sized(engine_cells.texts_cells(), target)
    found += [part(c.name, untimed(texts.measure, c), TEXTS_S) for c in compared]
    found.append(part(f"peer-{passes[0].name}", untimed(peer_model.measure, passes[0]), PEERS_S))
    return found


# One cell for each target that a time decides (docs/gpu.md), in the order in which they tell most.
TARGETS = (
    "attn-b8-m64-g4-ctx16384",  # G1
    "attn-b32-m1-g4-ctx16384",  # G5
    "attn-b1-m27-g4-ctx2048",  # G3
    "attn-b8-m64-g4-ctx16384-kv8-math8",  # G4
    "bits-attn-b8-m64-g4-ctx4090",  # G6
    "compact-b8-m64",
    "slots-lookahead-b32-ctx65536",  # G9
    "model-b1-m1",  # G7
    "model-b1-m84",  # G7
    "spec-b1-m84-ahead1-graphs-tau2",  # G8, G11
)


def targets(target: Target) -> list[Part]:
    """The ten targets without peers; the full stages do not repeat them (unless --force). They are
    parts of the stages that measure: their results stand there."""
    every = [*bench_kernel(target, quick=False, with_peers=False), *bench_step(target, quick=False)]
    if target.emulated:  # tiny cells have other names
        return every[:2]
    parts = {part.name: part for part in every}
    return [parts[name] for name in TARGETS]
