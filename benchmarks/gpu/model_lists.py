"""What the list, the cuts and the draw of a row with top_k or top_p take: one block's work
(cuda/accept/row_lists.cuh, row_cuts.cuh), of which every loop is counted.

`list_counts` says by the book what a row's scores make of the loops; the emulator's run of the
kernel has to agree (tests/kernels/test_cuda_lists_model.py). What a trip costs is counted in the
compiled kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.gpu.machine import Counts, Device, loops_of, slots

# cuda/accept/row_lists.cuh: threads of a block, tokens of which one largest score is kept, vectors
# of these that a thread reads at once, groups of scores that it does; tokens of a list; bins.
THREADS, WARPS, GROUP, GROUP_READS, KEPT_READS = 256, 8, 8, 8, 4
BATCH = KEPT_READS * THREADS
LISTED, USED_BINS, SURE_BINS, FINE_BINS = 2048, 245, 243, 512
PER_UNIT = np.float32(8)
CUT_READS = 4  # tokens of the cut's bin that a thread looks at in a trip
LIST_READS = 4  # tokens of a list that a thread reads in a trip
TOKEN_BYTES = 12  # of a list, in memory
# Barriers, each behind sums of bins that every warp finds for itself: of a list, of each batch of
# its groups, of top_k's cut and the draw, of top_p's and the draw.
LIST_BARRIERS, BATCH_BARRIERS, COUNT_BARRIERS, MASS_BARRIERS = 5, 2, 3, 5
# Loops of fewer instructions than sass_loops.json holds, as counted in the same machine code; and
# what lies between the loops: sums of bins, most of all. That takes its time at barriers.
SHORT: Mapping[str, Counts] = {
    "bits": {"issue": 9, "int": 5, "special": 2, "shared_bytes": 4},  # of a group; 11 for a word
    "write": {"issue": 17, "int": 4, "shared_bytes": 12, "store_bytes": 12},
    "keys": {"issue": 21, "fp32": 5, "int": 7, "convert": 1, "shared_bytes": 12},
    "edges": {"issue": 34, "fp32": 4, "int": 11, "special": 3, "convert": 1, "shared_bytes": 32},
    "edge": {"issue": 39, "fp32": 6, "int": 12, "special": 3, "convert": 2, "shared_bytes": 32},
    "sum": {"issue": 25, "int": 15, "convert": 1, "shared_bytes": 16},
    "unit": {"issue": 14, "int": 8, "convert": 2, "shared_bytes": 4},
}
BETWEEN: Mapping[str, Counts] = {
    "list": {"issue": 1152, "int": 701},
    "read": {"issue": 244, "int": 117},
    "draw": {"issue": 819, "int": 543},
}


@dataclass(frozen=True)
class ListCounts:
    """What a row's scores make of the loops over its list."""

    groups: int
    kept: int  # groups whose tokens are read
    bits: tuple[int, ...]  # of each warp: the most kept groups of a lane's words
    batches: int  # of kept groups; more where the list has to be made again, of fewer bins
    read: int  # groups of all batches
    listed: int
    counted: int  # tokens of the bin that top_k cuts
    weighed: int  # of the one that top_p cuts


def _within(counts: np.ndarray, most: int) -> tuple[int, int]:
    """Returns how many of the first bins hold no more than that, and how much they hold."""
    upto = np.cumsum(counts)
    bins = int((upto <= most).sum())
    return bins, int(upto[bins - 1]) if bins else 0


def _most(values: np.ndarray, each: int) -> int:
    """Returns the largest sum of `each` that follow one another, from the first on."""
    padded = np.append(values, np.zeros(-len(values) % each, values.dtype))
    return int(padded.reshape(-1, each).sum(1).max(initial=0))


def list_counts(
    row: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> ListCounts:
    """Returns them for one row of float32 scores without NaN.

    Raises   ValueError if the cut is not found on the list: another way is taken then.
    """
    f = np.float32
    chunks = -(-len(row) // 256)
    padded = np.append(row, np.full(chunks * 256 - len(row), -np.inf, f)).astype(f)
    best, scale = row.max(), f(1) / f(temperature) * PER_UNIT

    def behind(x: np.ndarray, finer: int) -> np.ndarray:
        return (best - x) * scale * f(1 << finer)

    by_group = padded.reshape(-1, GROUP)
    bins = np.minimum(behind(by_group.max(1), 0), USED_BINS).astype(int)
    held = np.bincount(bins[bins < USED_BINS], minlength=256)
    most = LISTED if top_k > 0 else LISTED - LISTED // 8
    reach = min(_within(held, most)[0], USED_BINS)
    if top_k > 0:
        reach = min(reach, _within(held, top_k - 1)[0] + 1)
    kept = bins < reach
    groups = np.flatnonzero(kept)

    words = kept.reshape(-1, 32).sum(1)
    of_warp = -(-len(bins) // (256 * WARPS)) * 256 // 32
    bits = []
    for warp in range(WARPS):
        own_words = words[warp * of_warp : (warp + 1) * of_warp]
        bits.append(_most(own_words, max(1, -(-len(own_words) // 32))))

    tokens = by_group[groups]
    real = (groups[:, None] * GROUP + np.arange(GROUP)) < len(row)
    # As padded with -infinity, columns behind the row are in no bin.
    coarse = np.where(real, behind(tokens, 0), np.inf)
    batches = read = 0
    while True:
        upto = np.cumsum((coarse < reach).sum(1))[BATCH - 1 :: BATCH]
        whole = -(-len(groups) // BATCH)
        made = next((i + 1 for i, n in enumerate(upto) if n > LISTED), whole)
        batches, read = batches + made, read + min(made * BATCH, len(groups))
        if (coarse < reach).sum() <= LISTED:
            break
        most = min(most, len(groups))
        most -= most // 4
        reach = min(reach, _within(held, most)[0])

    finer = 0
    while max(reach, 1) << (finer + 1) <= FINE_BINS:
        finer += 1
    far = np.where(real, behind(tokens, finer), np.inf)
    chosen, counted = coarse < reach, 0
    listed = int(chosen.sum())
    if 0 < top_k <= listed and reach <= SURE_BINS:
        fine = np.minimum(far[chosen], FINE_BINS - 1).astype(int)
        in_bins = np.bincount(fine, minlength=FINE_BINS)
        counted = int(in_bins[_within(in_bins, top_k - 1)[0]])
    if top_k and not 0 < counted <= THREADS:
        raise ValueError(f"top_k={top_k}: its cut is not in one bin of a list of this row")

    weighed = 0
    if top_p < 1.0:
        all_of = np.exp((row.astype(np.float64) - best) / temperature)
        scores, at = tokens[chosen], np.minimum(far[chosen], FINE_BINS - 1).astype(int)
        if top_k:
            keep = scores >= np.sort(scores)[-top_k]
            scores, at = scores[keep], at[keep]
        mass = np.exp((scores.astype(np.float64) - best) / temperature)
        wanted = np.float64(f(top_p)) * (mass if top_k else all_of).sum()
        upto = np.cumsum(np.bincount(at, mass, minlength=FINE_BINS))
        if upto[-1] < wanted:
            raise ValueError(f"top_p={top_p}: its cut lies behind the list of this row")
        weighed = int((at == (upto < wanted).sum()).sum())
    return ListCounts(len(bins), len(groups), tuple(bits), batches, read, listed, counted, weighed)


# The laws of cells with cuts: the largest top_k of a power of two and a usual top_p whose cuts lie
# on the lists of such rows.
LAWS: Mapping[str, tuple[int, float]] = {"top_k": (1024, 1.0), "top_p": (0, 0.9)}
TEMPERATURE, SPREAD = 0.8, 3.0  # of the cells' rows (accept_ops.py)


@cache
def cell_counts(vocab: int, cut: str) -> ListCounts:
    """Returns them for a row of a cell."""
    row = SPREAD * np.random.default_rng(0).standard_normal(vocab, np.float32)
    top_k, top_p = LAWS[cut]
    return list_counts(row.astype(np.float32), TEMPERATURE, top_k, top_p)


@dataclass(frozen=True)
class Trip:
    """A loop: what a trip of a warp needs, how many each warp makes, and whether each waits."""

    name: str
    counts: Counts
    trips: tuple[int, ...]
    waits: bool = False  # for L2, with nothing to do meanwhile
    between: bool = False  # no loop: what it takes alone is counted with barriers


def _one(found: list[dict[str, Counts]], name: str) -> Counts:
    if len(found) != 1:
        raise ValueError(f"row_laws_kernel: {len(found)} loops that {name}; the kernel has changed")
    return found[0]["body"]


def _less(counts: Counts, **of: int) -> Counts:
    return {name: number - of.get(name, 0) for name, number in counts.items()}


def _loops() -> dict[str, Counts]:
    """Returns what a trip of each loop needs.

    Raises   ValueError if one is not found: the kernel has changed.
    """
    every = loops_of("row_laws_kernel<float>")
    size = GROUP * 4 * GROUP_READS
    reads = [x for x in every if x["body"].get("load_bytes") == size]
    batch = [x for x in every if x["body"].get("load_bytes") == 3 * KEPT_READS * GROUP * 4]
    whole = 3 * 4 * LIST_READS
    copies = [
        x for x in every if x["body"].get("load_bytes") == x["body"].get("shared_bytes") == whole
    ]
    weighs = [
        i
        for i, x in enumerate(every)
        if x["body"].get("shared_bytes") == 20 and "load_bytes" not in x["body"]
    ]
    if len(reads) != 2 or len(weighs) != 1:
        raise ValueError("row_laws_kernel: no loops over groups, or over a list's weights")
    # One counts groups, with atomics; the other keeps them, for which it reads them again.
    bins = [x for x in reads if x["body"]["shared_bytes"] >= 4 * GROUP * GROUP_READS]
    keeps = [x for x in reads if x not in bins]
    # The same scores as they are at 16 bytes, anywhere, and behind the end: a trip takes the first.
    ways = 2 * KEPT_READS * GROUP
    cuts = [every[weighs[0] - 1], every[weighs[0] + 1]]
    if any(x["body"].get("shared_bytes") != 16 * CUT_READS or len(x["body"]) != 3 for x in cuts):
        raise ValueError("row_laws_kernel: no loops over the tokens of a cut's bin")
    return {
        "bins": _one(bins, "count groups"),
        "keep": _one(keeps, "keep groups"),
        "batch": _less(_one(batch, "list the tokens of a batch of groups"), issue=ways),
        "read": _one(copies, "read a list"),
        "weigh": every[weighs[0]]["body"],
        "cut": max((x["body"] for x in cuts), key=lambda x: x["issue"]),
    }


def list_trips(counts: ListCounts, cut: str) -> list[Trip]:
    """Returns the loops that make a row's list, and with top_k those that cut and draw."""
    loops = _loops()
    per_read = THREADS * GROUP * GROUP_READS
    reads = (-(-counts.groups // per_read),) * WARPS
    of_thread = _each(counts.listed, -(-counts.listed // THREADS), 1)
    found = [
        Trip("bins", loops["bins"], reads, True),
        Trip("keep", loops["keep"], reads, True),
        Trip("bits", SHORT["bits"], counts.bits),
        Trip("batch", loops["batch"], (counts.batches,) * WARPS, True),
        Trip("keys", SHORT["keys"], of_thread),
        Trip("", BETWEEN["list"], (1,) * WARPS, between=True),
    ]
    if cut == "top_k":
        return [*found, Trip("edges", SHORT["edges"], of_thread), *cut_trips(counts, cut)]
    return [*found, Trip("write", SHORT["write"], _over(counts.listed))]


def cut_trips(counts: ListCounts, cut: str) -> list[Trip]:
    """Returns the loops that cut a list and draw from it."""
    loops = _loops()
    of_thread = -(-counts.listed // THREADS)
    own = _each(counts.listed, of_thread, 1)
    edge = counts.counted if cut == "top_k" else counts.weighed
    looks = tuple(-(-edge // CUT_READS) if 32 * w < edge else 0 for w in range(WARPS))
    found = [Trip("cut", loops["cut"], looks), Trip("weigh", loops["weigh"], own)]
    if cut == "top_p":
        found = [
            Trip("read", loops["read"], _over(counts.listed, LIST_READS), True),
            *found,
            Trip("", BETWEEN["read"], (1,) * WARPS, between=True),
            Trip("edge", SHORT["edge"], own),
            Trip("sum", SHORT["sum"], own),
        ]
    unit = (of_thread,) + (0,) * (WARPS - 1)
    draw = Trip("", BETWEEN["draw"], (1,) * WARPS, between=True)
    return [*found, Trip("unit", SHORT["unit"], unit), draw]


def _each(items: int, of_thread: int, at_once: int) -> tuple[int, ...]:
    """Trips of each warp whose threads have so many items that follow one another."""
    if items == 0:
        return (0,) * WARPS
    left = (items - 32 * of_thread * w for w in range(WARPS))
    return tuple(-(-min(max(x, 0), of_thread) // at_once) for x in left)


def _over(items: int, at_once: int = 1) -> tuple[int, ...]:
    """Trips of each warp over items of which neighbours have one each."""
    return tuple(-(-max(items - 32 * w, 0) // (THREADS * at_once)) for w in range(WARPS))


def list_barriers(counts: ListCounts, cut: str) -> int:
    """Returns how often the block meets until there is a list, and with top_k its token."""
    behind = COUNT_BARRIERS if cut == "top_k" else 0
    return LIST_BARRIERS + BATCH_BARRIERS * counts.batches + behind


def trips_us(trips: list[Trip], barriers: int, device: Device) -> float:
    """Returns how long a block takes for loops that follow one another, alone."""
    us = barriers * device.barrier_us
    for loop in trips:
        if loop.between:
            continue
        busy = max(slots(loop.counts).values()) * sum(loop.trips) / 4  # schedulers
        us += busy / device.clock_hz * 1e6
        if loop.waits:
            us += max(loop.trips) * device.l2_latency_us
    return us


def trips_needs(trips: list[Trip], device: Device) -> dict[str, float]:
    """Returns what such a block needs of all multiprocessors' pipes."""
    needs: dict[str, float] = {}
    for loop in trips:
        for pipe, cycles in slots(loop.counts).items():
            us = cycles * sum(loop.trips) / (4 * device.sms) / device.clock_hz * 1e6
            needs[pipe] = needs.get(pipe, 0.0) + us
    return needs


def score_bytes(counts: ListCounts) -> int:
    """Returns the bytes of scores that a list reads: kept groups once."""
    return counts.read * GROUP * 4


def memory_bytes(counts: ListCounts, cut: str) -> int:
    """Returns all bytes that a list reads and writes in L2, those of the groups' largest scores
    with what the search wrote."""
    groups = counts.groups * 4 * 3
    listed = 2 * counts.listed * TOKEN_BYTES if cut == "top_p" else 0
    return groups + score_bytes(counts) + listed
