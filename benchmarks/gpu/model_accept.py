"""Predicted times of drawing tokens and accepting drafts by probabilities (cuda/accept)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.gpu import model_lists
from benchmarks.gpu.cells import MAX_DEPTH, StepCell
from benchmarks.gpu.machine import Counts, Device, Kernel, loops_of, slots
from benchmarks.gpu.problem import random_tree

ROWS_AHEAD = 4  # that are searched before the first is weighed
NODE_US = 0.02  # of one thread that looks at every node in shared memory
WALK_BARRIERS = 4
LEFT_BARRIERS = 3
PATH = 4  # drafts that each request accepts
LANE_TOKENS = 8  # of a chunk
# Accesses that wait for one another, cuda/accept/row_held.cuh: from a row's last mass to its token;
# from there to a mark, which exact match leaves out at the end; from there or from a draft's sum to
# a mark or the queue's entry, or from that to the next sibling or the token.
DRAWING, MARKING, HOLDING = 4, 5, 8
# The same in row_laws.cu and row_listed.cuh: from a row's last piece that is searched to its list
# (the largest score joined, counted, read; later the number that draws); from its last mass, or
# from its list, to what is listed (added, counted, header; the number that draws).
LISTING, CUTTING = 4, 4
# From a rejected draft's entry in the queue to what is left of a row that cuts, by one block along
# its list: taken, read, whose it is, the row's cut, its list, added, counted; and the draft's
# own probabilities and those of each sibling before it.
LEAVING = 7
# cuda/accept/row_laws.cu: how far rows may be searched ahead of those that are weighed.
AHEAD_BYTES = 16 << 20
# The same: chunks of 256 tokens of a piece, and blocks, each of which has one.
PIECE_CHUNKS, BLOCKS = 32, 264

Needs = Mapping[str, float]  # of each resource of the device, in microseconds


def turns(rows: int, row_bytes: float) -> Iterator[tuple[int, bool]]:
    """Yields the order of tasks (RowOrder of row_laws.cu): a row, and whether it is searched."""
    ahead = min(rows, ROWS_AHEAD)
    twos = min(max(int(AHEAD_BYTES / row_bytes), ahead) - ahead, (rows - ahead) // 2)
    for row in range(ahead):
        yield row, True
    searched = ahead
    for row in range(rows):
        for _ in range(2 if row < twos else 1):
            if searched < rows:
                yield searched, True
                searched += 1
        yield row, False


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
    # Along a list, whose tokens have weights; or over a row.
    left = [x for x in left if "convert" in x and ("fp32" not in x or x["fp32"] < 100) == lists]
    doubles = [x for x in doubles if (x["load_bytes"] == 4 * LANE_TOKENS) == lists]
    if not len(sums) == len(doubles) == len(left) == 1:
        raise ValueError("row_laws_kernel: no loop that sums probabilities, or that subtracts them")
    # Both ways to load are in a body; a trip takes one.
    trip = {"load_bytes": 4 * LANE_TOKENS}
    search = reads["body"] if lists else reads["always"]
    return Loops(search, weigh["body"], sums[0], {**doubles[0], **trip}, {**left[0], **trip})


@dataclass(frozen=True)
class Tasks:
    """What each task on a row, or on a draft's probabilities, needs of all multiprocessors; and how
    long what follows it takes, which only what is done meanwhile hides."""

    search: Needs
    weigh: Needs
    sums: Needs = field(default_factory=dict)
    subtract: Needs = field(default_factory=dict)
    left: Needs = field(default_factory=dict)
    listing: Needs = field(default_factory=dict)  # a row's list; with top_k its cut
    cutting: Needs = field(default_factory=dict)  # with top_p alone
    list_us: float = 0.0
    left_us: float = 0.0  # from a rejected draft to what it leaves; of each before it:
    before_us: float = 0.0
    draw_us: float = 0.0  # from the last mass, or with top_p from that and the list, to the token
    mark_us: float = 0.0  # to a mark; holding: to the next sibling
    end_us: float = 0.0  # behind the token, where nothing follows any more
    in_flight: int = 0  # turns that blocks have begun before the first of them is finished


@dataclass
class Reach:
    """What is done of a step's rows before it is known that no path leads to them."""

    weighed: int = 0
    summed: int = 0
    subtracted: int = 0  # probabilities of drafts
    left: int = 0  # rows that they are subtracted from
    listed: int = 0
    needs: dict[str, float] = field(default_factory=dict)
    end: float = 0.0  # when the last decision falls

    @property
    def now(self) -> float:
        """When all that was begun would be finished if nothing waited."""
        return max(self.needs.values(), default=0.0)

    def add(self, needs: Needs) -> None:
        for pipe, us in needs.items():
            self.needs[pipe] = self.needs.get(pipe, 0.0) + us


DRAWN, HELD = range(2)


def reach(
    trees: Sequence[Sequence[int]],
    tasks: Tasks,
    holds: bool,
    cut: str = "",
    order: Iterator[tuple[int, bool]] | None = None,
) -> Reach:
    """Returns what the order of tasks leaves of the rows of these trees (parents).

    Each path goes PATH first children down; everything else is rejected. What is known by then
    keeps a task from being done, whether it is a row's list, its masses or a draft's sum.

    holds   drafts are held by rejection; else compared with the token drawn
    cut     which law all rows have: "" cuts nothing, "top_k" needs no row's mass, "top_p" does
    order   None: each row is searched and weighed in turn
    """
    parents = [p + first if p >= 0 else -1 for first, tree in zip(
        itertools.accumulate((len(t) for t in trees), initial=0), trees, strict=False)
        for p in tree]  # fmt: skip
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    kept: dict[int, int] = {}
    for root in (n for n, parent in enumerate(parents) if parent < 0):
        node = root
        for _ in range(PATH):
            if not children[node]:
                break
            kept[node] = node = children[node][0]
    on_path = {*kept, *kept.values(), *(n for n, p in enumerate(parents) if p < 0)}
    never = float("inf")
    unused, unheld = [never] * len(parents), [never] * len(parents)  # since when
    found = Reach()
    events: list[tuple[float, int, int]] = []
    # When of the two that it takes the first came: a row's list and masses, a draft's sum and law.
    ready: dict[int, float] = {}
    joined: dict[int, float] = {}

    def mark(node: int, now: float, held: bool) -> None:
        unused[node] = min(unused[node], now)
        if held:
            unheld[node] = min(unheld[node], now)
        for child in children[node]:
            mark(child, now, True)

    def ends(node: int, at: float) -> None:
        # A row's list and its token are waited for, whoever wants them. Of siblings held one after
        # another those of the paths' rows: that all others are rejected is for their work alone.
        if not holds or node in on_path or parents[node] in on_path:
            found.end = max(found.end, at)

    def drawn(node: int, at: float) -> None:
        ends(node, at + tasks.end_us)
        heapq.heappush(events, (at if holds else at + tasks.mark_us, DRAWN, node))

    def prepared(node: int, at: float) -> None:  # by top_p alone
        if node not in ready:
            ready[node] = at
            return
        found.add(tasks.cutting)
        drawn(node, max(at, ready[node]) + tasks.draw_us)

    def join(node: int, at: float) -> None:
        if node not in joined:
            joined[node] = at
            return
        heapq.heappush(events, (max(at, joined[node]) + tasks.mark_us, HELD, node))

    def decide(until: float) -> None:
        while events and events[0][0] <= until:
            now, kind, node = heapq.heappop(events)
            if kind == DRAWN:
                if holds:
                    if children[node]:
                        join(children[node][0], now)
                else:
                    for child in children[node]:
                        if kept.get(node) != child:
                            mark(child, now, True)
                continue
            parent = parents[node]
            ends(node, now)
            if kept.get(parent) == node:
                for child in children[parent]:
                    if child > node:
                        mark(child, now, True)
                continue
            mark(node, now, False)
            before = children[parent].index(node) + 1
            found.subtracted += before
            found.left += 1
            busy = found.now
            for _ in range(before):
                found.add(tasks.subtract)
            found.add(tasks.left)
            wait = tasks.left_us + before * tasks.before_us
            done = max(now + wait + found.now - busy, found.now)
            if before < len(children[parent]):
                join(children[parent][before], done)
            ends(node, done + tasks.mark_us)

    begun: list[float] = []  # of each turn, when blocks were free for those behind it
    for row, searches in order or ((n, s) for n in range(len(parents)) for s in (True, False)):
        begun.append(found.now)
        taken = begun[max(0, len(begun) - 1 - tasks.in_flight)]
        decide(found.now)
        if searches:
            found.add(tasks.search)
            if cut and unused[row] > found.now:
                found.listed += 1
                found.add(tasks.listing)
                at = found.now + tasks.list_us
                found.end = max(found.end, at)
                (drawn if cut == "top_k" else prepared)(row, at)
            continue
        wanted = unused[row] > taken
        if cut != "top_k" and wanted:
            found.weighed += 1
            found.add(tasks.weigh)
            if cut:
                prepared(row, found.now)
            else:
                drawn(row, found.now + tasks.draw_us)
        if holds and parents[row] >= 0 and unheld[row] > (found.now if wanted else taken):
            found.summed += 1
            found.add(tasks.sums)
            join(row, found.now)
    decide(float("inf"))
    return found


def needs_of(
    counts: Counts, num_bytes: float, device: Device, *, memory: bool = False, more: float = 0.0
) -> dict[str, float]:
    """Returns what a loop over so many bytes needs of all multiprocessors.

    memory   they come from there, and not only from L2
    more     bytes that the loop writes
    """
    trips = num_bytes / (32 * counts["load_bytes"]) / (4 * device.sms)
    needs = {pipe: trips * c / device.clock_hz * 1e6 for pipe, c in slots(counts).items()}
    needs["L2"] = (num_bytes + more) / device.l2_bytes_per_s * 1e6
    if memory:
        needs["HBM"] = num_bytes / device.hbm_bytes_per_s * 1e6
    return needs


def tasks_of(vocab: int, device: Device, kind: str, cut: str = "") -> Tasks:
    """Returns what the tasks on a row of so many scores need (cuda/accept/row_laws.cu)."""
    found = loops(bool(cut))
    size, access = vocab * 4.0, device.l2_latency_us
    holds = kind == "accept"
    listing: dict[str, float] = {}
    cutting: dict[str, float] = {}
    list_us, draw_us = 0.0, DRAWING * access
    groups, left_us, before_us = 0.0, draw_us, 0.0
    along = size  # bytes of the scores that what is left is found from
    if cut:
        counts = model_lists.cell_counts(vocab, cut)
        making = model_lists.list_trips(counts, cut)
        barriers = model_lists.list_barriers(counts, cut)
        listing = model_lists.trips_needs(making, device)
        listing["L2"] = model_lists.memory_bytes(counts, cut) / device.l2_bytes_per_s * 1e6
        list_us = LISTING * access + model_lists.trips_us(making, barriers, device)
        groups = counts.groups * 4.0
        left_us, before_us = LEAVING * access, access
        left_us += LEFT_BARRIERS * device.barrier_us
        along = counts.listed * 4.0
        if cut == "top_k":  # the token is drawn with the list
            draw_us = 0.0
        else:
            last = model_lists.cut_trips(counts, cut)
            cutting = model_lists.trips_needs(last, device)
            draw_us = CUTTING * access
            draw_us += model_lists.trips_us(last, model_lists.MASS_BARRIERS, device)
    return Tasks(
        search=needs_of(found.search, size, device, memory=True, more=groups),
        weigh=needs_of(found.weigh, size, device),
        sums=needs_of(found.sums, size, device, memory=True),
        subtract=needs_of(found.subtract, along, device),
        left=needs_of(found.left, along, device),
        listing=listing,
        cutting=cutting,
        list_us=list_us,
        left_us=left_us,
        before_us=before_us,
        draw_us=draw_us,
        mark_us=(HOLDING if holds else MARKING) * access,
        # Behind the last row's token: for drafts whether a mark is still of use.
        end_us=access if kind == "match" else 0.0,
        in_flight=BLOCKS // -(-vocab // (256 * PIECE_CHUNKS)),
    )


def row_laws(
    trees: Sequence[Sequence[int]], vocab: int, device: Device, kind: str, cut: str = ""
) -> Kernel:
    """Returns what finds all rows' largest scores, masses and draws (cuda/accept/row_laws.cu).

    trees   of the drafts, by parents
    kind    of the cell: what is drawn is not compared ("sample"), is ("match"), or drafts are held
            ("accept")
    cut     which law all rows have, as for ``reach``

    Only the search reads the scores from device memory; blocks that do something else do not wait
    for it but at the beginning and for a row's largest score.
    """
    rows, size = sum(len(tree) for tree in trees), vocab * 4.0
    tasks = tasks_of(vocab, device, kind, cut)
    done = reach(trees, tasks, kind == "accept", cut, turns(rows, size))
    # The first rows are read before there is anything to weigh.
    ahead = min(rows, ROWS_AHEAD) * size / device.hbm_bytes_per_s * 1e6
    fixed = device.launch_us + device.first_load_us + ahead
    return Kernel("laws", done.needs, fixed + max(0.0, done.end - done.now))


def row_op(cell: StepCell, device: Device, cut: str = "") -> tuple[Kernel, ...]:
    """Returns the kernels of "sample", "match" or "accept".

    cut   what the laws cut off, as for ``reach``
    """
    walk = device.launch_us + device.first_load_us
    trees: list[list[int]] = [[-1]] * (cell.requests * cell.rows)
    if cell.kind != "sample":
        trees = [random_tree(cell.rows, MAX_DEPTH, seed=1)] * cell.requests
        # Rejection follows its path; exact match looks for the deepest of the nodes that were kept.
        nodes = PATH if cell.kind == "accept" else cell.rows
        walk += nodes * NODE_US + WALK_BARRIERS * device.barrier_us
    laws = row_laws(trees, cell.vocab, device, cell.kind, cut)
    return (Kernel("clear", {}, device.launch_us), laws, Kernel(cell.kind, {}, walk))
