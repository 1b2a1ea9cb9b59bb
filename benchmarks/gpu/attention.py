"""Attention cells: correctness first, then ours and the peers in one run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from benchmarks.gpu import problem as problems
from benchmarks.gpu import timing
from benchmarks.gpu.cells import AttentionCell
from benchmarks.gpu.floors import Work
from benchmarks.gpu.ours import Attention, Unsupported
from benchmarks.gpu.peers import Absent, Peer, peers_of
from benchmarks.gpu.results import scrub
from benchmarks.gpu.run import Target

# Tree cells for which rows are replayed as plain decoding, bit by bit. Off every page boundary.
EXACT_CELLS = [
    AttentionCell(requests, rows, 4090, groups=("G6",))
    for requests in (1, 8, 32)
    for rows in (11, 27, 64, 84)
]
NODES_PER_CELL = 6


def figures(work: Work, us: list[float]) -> dict[str, Any]:
    """Returns what a program's rounds say; None everywhere if nothing was timed."""
    if not us:
        return {"us": None}
    median = timing.median(us)
    return {
        "us": round(median, 3),
        "rounds": [round(value, 3) for value in us],
        "gb_per_s": round(work.needed_bytes / median / 1e3, 1),
        "tflop_per_s": round(work.flops / median / 1e6, 2),
        "over_floor": round(median / work.floor_us, 3),
    }


def describe(work: Work) -> dict[str, Any]:
    return {
        "needed_bytes": work.needed_bytes,
        "flops": work.flops,
        "floor_us": round(work.floor_us, 3),
        "compute_bound": work.compute_bound,
    }


def check(program: Any, sets: list[problems.Problem]) -> float:
    """Returns the error of a program on its first and last set, over poisoned outputs.

    Raises   ArithmeticError if it is larger than rounding explains, or NaN.
    """
    worst = 0.0
    for index in sorted({0, len(sets) - 1}):
        sets[index].out.fill_(math.nan)
        out = program(index)
        worst = max(worst, problems.error(sets[index], out))
    limit = problems.max_error(sets[0].cell)
    if not worst <= limit:
        raise ArithmeticError(f"error {worst:.3g} against float32, at most {limit} is rounding")
    return worst


def measure(
    cell: AttentionCell,
    target: Target,
    timer: timing.Timer,
    pool: problems.RandomPool,
    with_peers: bool,
) -> dict[str, Any]:
    """Returns the record of one cell.

    Raises   ArithmeticError if our output is wrong; a peer that is wrong or fails is recorded.
    """
    sets = problems.make_sets(cell, target.device, pool)
    work = cell.work()
    record: dict[str, Any] = {
        **dataclasses.asdict(cell),
        **describe(work),
        "sets": len(sets),
        "programs": {},
    }
    programs: dict[str, timing.Program] = {}
    errors: dict[str, float] = {}
    try:
        for mode in ("exact", "fast"):
            ours = Attention(sets, target, exact=mode == "exact")
            errors[mode] = check(ours, sets)
            if bool(ours.status.any()):
                raise ArithmeticError(f"{mode}: status {ours.status.tolist()}")
            programs[mode] = ours
    except Unsupported as reason:
        return {**record, "status": "unsupported", "reason": str(reason)}
    peers = dict(peers_of(cell)) if with_peers else {}
    for name, make in peers.items():
        try:
            peer: Peer = make(sets)
            errors[name] = check(peer, sets)
        except Absent as reason:
            record["programs"][name] = {"status": "absent", "reason": scrub(str(reason))}
        except Exception as error:  # a peer's failure is a result, whatever it is
            text = scrub(f"{type(error).__name__}: {error}")[:500]
            record["programs"][name] = {"status": "failed", "error": text}
        else:
            programs[name] = peer
            record["programs"][name] = {"plan_us": round(peer.plan_us, 1)}
    rounds = timer.measure(programs, len(sets))
    for name in programs:
        entry = record["programs"].setdefault(name, {})
        if name in timer.failures:
            if name not in peers:
                raise RuntimeError(f"{name}: {timer.failures[name]}")
            entry |= {"status": "failed", "error": scrub(timer.failures[name])[:500]}
            continue
        entry |= {"status": "ok", "error": float(f"{errors[name]:.3g}")}
        entry |= figures(work, rounds.get(name, []))
    record["status"] = "ok"
    return record


# -- G6: bits -------------------------------------------------------------------------------------


def path_of(parents: list[int], node: int) -> list[int]:
    """Returns the rows from the golden token to `node`."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def replay(source: problems.Problem, request: int, node: int) -> problems.Problem:
    """Returns a node as plain decoding would meet it: its path committed, one row, other pages."""
    cell = source.cell
    path = path_of(source.parents, node)
    k, v = problems.dense(source, request)
    slots = [*range(cell.context), *(cell.context + row for row in path)]
    alone = dataclasses.replace(cell, requests=1, rows=1, context=len(slots) - 1)
    pages = -(-len(slots) // cell.page_size)
    order = torch.arange(pages, device=k.device).flip(0)

    def place(dense: torch.Tensor) -> torch.Tensor:
        raw = dense.view(torch.uint8)[slots]
        full = torch.zeros(pages * cell.page_size, *raw.shape[1:], dtype=torch.uint8).to(k.device)
        full[: len(slots)] = raw
        paged = full.view(pages, cell.page_size, cell.num_kv_heads, -1).transpose(1, 2)
        return paged[order].contiguous().view(dense.dtype)

    row = request * cell.rows + node
    return problems.Problem(
        alone,
        source.q[row : row + 1].clone(),
        place(k),
        place(v),
        order.to(torch.int32).view(1, pages),  # flipping twice restores the order
        torch.tensor([len(slots) - 1], dtype=torch.int32, device=k.device),
        torch.tensor([0, 1], dtype=torch.int32, device=k.device),
        [-1],
        torch.ones(1, 1, dtype=torch.bool),
        None,
        torch.empty_like(source.out[:1]),
    )


def count_differing(
    cell: AttentionCell, target: Target, pool: problems.RandomPool, exact: bool = True
) -> dict[str, Any]:
    """Compares nodes of a tree with the same tokens decoded alone; returns the differing bits."""
    source = problems.make_sets(cell, target.device, pool)[0]
    together = Attention([source], target, exact)(0).clone()
    differing = elements = 0
    generator = torch.Generator().manual_seed(3)
    picked = torch.randint(0, cell.requests * cell.rows, (NODES_PER_CELL,), generator=generator)
    for row in picked.tolist():
        alone = replay(source, row // cell.rows, row % cell.rows)
        attention = Attention([alone], target, exact)
        expected = attention(0)[0]
        difference = together[row].view(torch.int16) != expected.view(torch.int16)
        differing += int(difference.sum())
        elements += difference.numel()
    return {
        **dataclasses.asdict(cell),
        "status": "ok" if differing == 0 or not exact else "failed",
        "exact": exact,
        "elements": elements,
        "differing": differing,
    }
