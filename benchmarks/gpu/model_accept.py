"""Predicted times of drawing tokens and accepting drafts by probabilities (cuda/accept)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.cells import MAX_DEPTH, StepCell
from benchmarks.gpu.machine import Counts, Device, Kernel, loops_of, slots
from benchmarks.gpu.problem import random_tree

ROWS_AHEAD = 4  # that are searched before the first is weighed
NODE_US = 0.02  # of one thread that looks at every node in shared memory
WALK_BARRIERS = 4
PATH = 4  # drafts that each request accepts
LANE_TOKENS = 8  # of a chunk
# Accesses that wait for one another, cuda/accept/row_held.cuh: from a row's last mass to its token;
# from there to a mark, which exact match leaves out at the end; from there or from a draft's sum to
# a mark or the queue's entry, or from that to the next sibling or the token.
DRAWING, MARKING, HOLDING = 4, 5, 8
# cuda/accept/row_laws.cu: how far rows may be searched ahead of those that are weighed.
AHEAD_BYTES = 16 << 20
# cuda/accept/row_lists.cuh: threads of a block, tokens of which one largest score is kept, vectors
# of these that a thread reads at once; groups that are kept, as many as tokens fit a list, of them
# that a thread reads at once, and how often; barriers of a list. cuda/accept/row_cuts.cuh: barriers
# of a cut and the draw behind it.
LIST_THREADS, LIST_GROUP, GROUP_READS = 256, 8, 8
LISTED, KEPT_READS, KEPT_PASSES = 2048, 4, 3
LIST_BARRIERS, COUNT_BARRIERS, MASS_BARRIERS = 7, 2, 5


def list_loops(again: bool) -> tuple[Counts, Counts]:
    """Returns the loops over the largest scores of a row's groups: one counts them in bins, the
    other says which are kept, and reads them again or not.

    Raises   ValueError if they are not found: the kernel has changed.
    """
    size = LIST_GROUP * 4 * GROUP_READS
    found = [x for x in loops_of("row_laws_kernel<float>") if x["body"].get("load_bytes") == size]
    if len(found) != 2:
        raise ValueError("row_laws_kernel: no two loops over the largest scores of groups")
    keeps, counts = sorted(found, key=lambda x: x["always"]["issue"] - x["body"]["issue"])
    return counts["body"], keeps["body" if again else "always"]


def list_us(vocab: int, device: Device) -> float:
    """Returns how long a block takes for a row's list.

    The largest scores of groups once, or twice where a thread does not hold all of its own; the
    groups that were kept, at most as many as tokens fit.
    """
    groups = -(-vocab // 256) * (256 // LIST_GROUP)
    trips = -(-groups // (LIST_THREADS * LIST_GROUP * GROUP_READS))
    waits = trips if trips == 1 else 2 * trips
    waits += KEPT_PASSES * -(-LISTED // (LIST_THREADS * KEPT_READS))
    warps = LIST_THREADS / 32 / 4  # of a scheduler
    busy = sum(max(slots(loop).values()) for loop in list_loops(trips > 1)) * trips * warps
    fixed = waits * device.l2_latency_us + LIST_BARRIERS * device.barrier_us
    return fixed + busy / device.clock_hz * 1e6


def rows_left(rows: int, row_bytes: float) -> int:
    """Returns how many rows are weighed when all have been searched (RowOrder of row_laws.cu)."""
    ahead = min(rows, ROWS_AHEAD)
    twos = min(max(int(AHEAD_BYTES / row_bytes), ahead) - ahead, (rows - ahead) // 2)
    return ahead + twos


@dataclass(frozen=True)
class Loops:
    """The loops of row_laws_kernel<float>, each over every token that it looks at."""

    search: Counts
    weigh: Counts
    sums: Counts  # probabilities
    subtract: Counts  # those of a rejected draft
    left: Counts  # a row's masses without its rejected drafts


def loops(lists: bool) -> Loops:
    """Returns them; lists: the search writes down what lists are made of.

    Raises   ValueError if one is not found: the kernel has changed.
    """
    found = [x for x in loops_of("row_laws_kernel<float>") if x["body"].get("load_bytes", 0) >= 16]
    plain = [x for x in found if "convert" not in x["body"]]
    looks = [x for x in plain if x["body"].get("fp32", 0) > 0]  # and does not just copy
    reads = max(looks, key=lambda x: x["body"]["load_bytes"] / x["body"]["issue"])
    weigh = max(plain, key=lambda x: x["body"].get("fp32", 0) / x["body"]["load_bytes"])
    sums = [x["body"] for x in plain if x["always"].get("load_bytes") == 128 and x is not reads]
    # In float64: three conversions for each of a lane's tokens.
    doubles = [x["body"] for x in found if x["always"].get("convert") == 3 * LANE_TOKENS]
    left = [
        x["body"] for x in found if "shuffle" in x["body"] and x["body"].get("store_bytes") == 8
    ]
    left = [x for x in left if "convert" in x]
    if not len(sums) == len(doubles) == len(left) == 1:
        raise ValueError("row_laws_kernel: no loop that sums probabilities, or that subtracts them")
    # Both ways to load are in a body; a trip takes one.
    trip = {"load_bytes": 4 * LANE_TOKENS}
    search = reads["body"] if lists else reads["always"]
    return Loops(search, weigh["body"], sums[0], {**doubles[0], **trip}, {**left[0], **trip})


@dataclass
class Reach:
    """What is done of a step's rows before it is known that no path leads to them."""

    weighed: int = 0
    summed: int = 0
    subtracted: int = 0  # probabilities of drafts
    left: int = 0  # rows that they are subtracted from
    end: float = 0.0  # when the last path's last decision falls, in turns
    last: int = 0  # the last row of a path


def reach(trees: Sequence[Sequence[int]], late: float, holds: bool) -> Reach:
    """Returns what the order of tasks leaves of the rows of these trees (parents).

    A turn weighs a row and sums its draft's probabilities; what they decide is known `late` turns
    later. Each path goes PATH first children down; everything else is rejected.

    holds   drafts are held by rejection; else compared with the token drawn
    """
    parents = [p + first if p >= 0 else -1 for first, tree in zip(
        itertools.accumulate((len(t) for t in trees), initial=0), trees, strict=False)
        for p in tree]  # fmt: skip
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    kept: dict[int, int] = {}
    ends = set()
    for root in (n for n, parent in enumerate(parents) if parent < 0):
        node = root
        for _ in range(PATH):
            if not children[node]:
                break
            kept[node] = node = children[node][0]
        ends.add(node)
    on_path = ends | set(kept)
    never = float("inf")
    unused, unheld = [never] * len(parents), [never] * len(parents)
    found = Reach(last=max(on_path))

    def mark(node: int, now: float, held: bool) -> None:
        unused[node] = min(unused[node], now)
        if held:
            unheld[node] = min(unheld[node], now)
        for child in children[node]:
            mark(child, now, True)

    def join(node: int, now: float) -> None:
        if unheld[node] > node:
            heapq.heappush(events, (max(now, node + late), 1, node))

    events: list[tuple[float, int, int]] = [(float(n), 0, n) for n in range(len(parents))]
    heapq.heapify(events)
    while events:
        now, kind, node = heapq.heappop(events)
        parent = parents[node]
        if kind == 0:  # its turn
            if holds and parent >= 0 and unheld[node] > now:
                found.summed += 1
            if unused[node] <= now:
                continue
            found.weighed += 1
            heapq.heappush(events, (now + late, 2, node))
        elif kind == 2:  # drawn from
            if not holds:
                for child in children[node]:
                    if kept.get(node) != child:
                        mark(child, now, True)
            elif children[node]:
                join(children[node][0], now)
        elif kept.get(parent) == node:  # held, and kept
            for child in children[parent]:
                if child > node:
                    mark(child, now, True)
        else:
            mark(node, now, False)
            before = children[parent].index(node) + 1
            found.subtracted += before
            found.left += 1
            if before < len(children[parent]):
                join(children[parent][before], now + late)
            now += late
        if kind != 0 and (parent in on_path or node in on_path):
            found.end = max(found.end, now)
    return found


def needs_of(counts: Counts, num_bytes: float, device: Device) -> dict[str, float]:
    """Returns what a loop over so many bytes needs of all multiprocessors' pipes."""
    trips = num_bytes / (32 * counts["load_bytes"]) / (4 * device.sms)
    return {pipe: trips * c / device.clock_hz * 1e6 for pipe, c in slots(counts).items()}


def row_laws(
    rows: int, vocab: int, device: Device, cut: str = "", reached: Reach | None = None
) -> Kernel:
    """Returns what finds all rows' largest scores, masses and draws (cuda/accept/row_laws.cu).

    cut      which law all rows have: "" cuts nothing, "top_k" needs no row's mass, "top_p" does
    reached  what is done of a step of drafts; None: all rows are weighed, nothing is held

    Only the search reads the scores from device memory; blocks that do something else do not wait
    for it but at the beginning and for a row's largest score.
    """
    found = loops(bool(cut))
    done = reached or Reach(weighed=rows)
    row_bytes = vocab * 4.0
    weighed = 0 if cut == "top_k" else done.weighed
    reads = [
        (found.search, rows),
        (found.weigh, weighed),
        (found.sums, done.summed),
        (found.subtract, done.subtracted),
        (found.left, done.left),
    ]
    needs = {"HBM": (rows + done.summed) * row_bytes / device.hbm_bytes_per_s * 1e6}
    read = rows + weighed + done.summed + done.subtracted + done.left
    needs["L2"] = read * row_bytes / device.l2_bytes_per_s * 1e6
    for loop, times in reads:
        for pipe, us in needs_of(loop, times * row_bytes, device).items():
            needs[pipe] = needs.get(pipe, 0.0) + us
    # The first rows are read before there is anything to weigh.
    ahead = min(rows, ROWS_AHEAD) * row_bytes / device.hbm_bytes_per_s * 1e6
    fixed = device.launch_us + device.first_load_us + ahead
    if done.summed:  # what is decided when there is nothing left to do
        fixed += max(0.0, done.end - rows) * max(needs.values()) / rows
    else:  # the last row's draw, and for drafts whether a mark is still of use
        fixed += (DRAWING if reached is None else DRAWING + 1) * device.l2_latency_us
    if cut:
        fixed += cut_us(rows, row_bytes, weighed, cut, max(needs.values()), reached, device)
    return Kernel("laws", needs, fixed)


def cut_us(
    rows: int,
    row_bytes: float,
    weighed: int,
    cut: str,
    busy_us: float,
    reached: Reach | None,
    device: Device,
) -> float:
    """Returns what the cuts add that nothing hides.

    The last row's: by top_k all of it. By top_p alone the list is made while rows are weighed that
    were searched before. Of a step of drafts the last row that a path leads to; rows behind it are
    searched meanwhile.

    weighed, busy_us   rows that are; what all rows' tasks take together
    """
    listing = list_us(int(row_bytes / 4), device)
    if cut == "top_k":
        late = listing + COUNT_BARRIERS * device.barrier_us
    else:  # the list is read back by whoever weighed the last piece
        share = weighed / rows * rows_left(rows, row_bytes)
        hidden = share * max(needs_of(loops(True).weigh, row_bytes, device).values())
        late = max(0.0, listing - hidden)
        late += device.l2_latency_us + MASS_BARRIERS * device.barrier_us
    if reached is None:
        return late
    return max(0.0, late - max(0.0, rows - 1 - reached.last) * busy_us / rows)


def late_of(rows: int, vocab: int, device: Device, holds: bool, cut: str = "") -> float:
    """Returns how many turns pass from a row's turn until what it decides is known."""
    all_rows = Reach(weighed=rows, summed=rows if holds else 0)
    turn_us = max(row_laws(rows, vocab, device, reached=all_rows).needs.values()) / rows
    late = (DRAWING + (HOLDING if holds else MARKING)) * device.l2_latency_us
    if cut:
        barriers = COUNT_BARRIERS if cut == "top_k" else MASS_BARRIERS
        late += list_us(vocab, device) + barriers * device.barrier_us
    return late / turn_us


def row_op(cell: StepCell, device: Device, cut: str = "") -> tuple[Kernel, ...]:
    """Returns the kernels of "sample", "match" or "accept".

    cut   what the laws of "sample" and "match" cut off, as for ``row_laws``
    """
    rows = cell.requests * cell.rows
    walk = device.launch_us + device.first_load_us
    reached = None
    if cell.kind != "sample":
        tree = random_tree(cell.rows, MAX_DEPTH, seed=1)
        holds = cell.kind == "accept"
        late = late_of(rows, cell.vocab, device, holds, cut)
        reached = reach([tree] * cell.requests, late, holds)
        # Rejection follows its path; exact match looks for the deepest of the nodes that were kept.
        walk += (PATH if holds else cell.rows) * NODE_US + WALK_BARRIERS * device.barrier_us
    laws = row_laws(rows, cell.vocab, device, cut, reached)
    return (Kernel("clear", {}, device.launch_us), laws, Kernel(cell.kind, {}, walk))
