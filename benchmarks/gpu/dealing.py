"""The attention plan in plain Python: which multiprocessor walks which keys, and what that costs.

Written from the text of cuda/attention/plan.cuh and cpp/backend/attention/arithmetic.h, without
their code; tests/unit/test_gpu_model.py holds it against the plan kernel. Every request of a cell
has the same rows and context.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

KEYS = 64  # of a key block: one stage of K and V
JOB_COST = 1  # of a job besides its key blocks, in key blocks
MAX_LANES = 32  # row tiles of a stream that lie side by side
LANE_PERCENT = 110  # lanes if that leaves the busiest block at most that of an equal share
SLACK_PERCENT = 118  # whole jobs if the busiest block has at most that of an equal share


@dataclass(frozen=True)
class Step:
    """What the plan reads of a step, and of the kernel that was picked."""

    requests: int
    rows: int  # draft tokens and golden one, of each request
    context: int
    kv_heads: int
    group: int  # query heads per KV head
    row_tile: int
    num_blocks: int
    exact: bool = True
    max_depth: int = 15
    granule: int = 16
    tree: bool = True


@dataclass(frozen=True)
class Unit:
    """A run of chunks of one job that one thread block walks; keys [first_key, end_key)."""

    job: int
    stream: int  # request and KV head: jobs of one stream read the same K/V
    block: int
    first_chunk: int
    end_chunk: int
    first_key: int
    end_key: int
    states: int  # left for the finish kernel

    @property
    def key_blocks(self) -> range:
        return range(self.first_key // KEYS, -(-self.end_key // KEYS))


@dataclass(frozen=True)
class Deal:
    units: list[Unit]
    num_jobs: int
    whole: bool

    @property
    def states(self) -> int:
        return sum(unit.states for unit in self.units)

    @property
    def jobs_of_one_state(self) -> int:
        """Jobs that are not cut, whose output the main pass writes in fast mode."""
        by_job = Counter[int]()
        for unit in self.units:
            by_job[unit.job] += unit.states
        return sum(states == 1 for states in by_job.values())


def chunk_begin(chunk: int) -> int:
    """First key of a chunk: 256 keys below position 2048, then 512, 1024, 2048."""
    for first, keys, size in ((44, 32768, 2048), (20, 8192, 1024), (8, 2048, 512)):
        if chunk > first:
            return keys + (chunk - first) * size
    return chunk * 256


def chunk_of(position: int) -> int:
    chunk = 0
    while chunk_begin(chunk + 1) <= position:
        chunk += 1
    return chunk


def main_end(step: Step, row_block: int) -> int:
    """End of the keys that some row of a tile may see in the main pass."""
    last_row = min((row_block + 1) * step.row_tile, step.rows * step.group) - 1
    if not step.tree:
        last = step.context + last_row // step.group
    elif step.exact:
        last = step.context + min(step.max_depth, step.rows - 1)
    else:
        last = step.context + step.rows - 1
    if not step.exact:
        return last + 1
    return max(0, last - step.max_depth) // step.granule * step.granule


def deal(step: Step, max_units: int = 1 << 30, max_states: int = 1 << 30) -> Deal:
    """Cuts the line of all jobs into equal shares of the thread blocks.

    If there is a block for each chunk, each gets its own. Where there are more jobs than blocks,
    the blocks are divided into as many lanes as a stream has row tiles, and tile i of every stream
    lies on lane i: blocks at the same place of their lanes walk the same keys at the same time.
    """
    tiles = -(-step.rows * step.group // step.row_tile)
    ends = [main_end(step, tile) for tile in range(tiles)]
    costs = [JOB_COST + -(-end // KEYS) if end > 0 else 0 for end in ends]
    streams = step.requests * step.kv_heads
    total, num_jobs = streams * sum(costs), streams * tiles
    share = max(1, -(-total // step.num_blocks))
    lanes, width = 1, step.num_blocks
    if tiles <= MAX_LANES and num_jobs > step.num_blocks >= tiles > 1:
        narrow = step.num_blocks // tiles
        lane_share = max(1, -(-streams * max(costs) // narrow))
        if lane_share * 100 <= share * LANE_PERCENT:
            lanes, width, share = tiles, narrow, lane_share

    by_chunk = False  # a block for each chunk, if there are enough

    def owner(lane: int, begin: int, cost: int) -> int:
        if by_chunk:
            return begin + cost // 2
        return lane * width + min((2 * begin + cost) // (2 * share), width - 1)

    def cut(whole: bool) -> Iterator[Unit]:
        line = 0
        for place in range(num_jobs):
            lane = place // streams if lanes > 1 else 0
            if lanes > 1 and place % streams == 0:
                line = 0
            job = place % streams * tiles + lane if lanes > 1 else place
            end, cost = ends[job % tiles], costs[job % tiles]
            if cost == 0:
                continue
            end_chunk = chunk_of(end - 1) + 1
            cost = end_chunk if by_chunk else cost
            pieces: list[tuple[int, int]] = []  # first chunk and block of each unit
            at = line
            for chunk in range(end_chunk):
                stop = min(chunk_begin(chunk + 1), end)
                piece = -(-stop // KEYS) - chunk_begin(chunk) // KEYS
                piece += JOB_COST if chunk == 0 else 0
                piece = 1 if by_chunk else piece
                block = owner(lane, line, cost) if whole else owner(lane, at, piece)
                if not pieces or block != pieces[-1][1]:
                    pieces.append((chunk, block))
                at += piece
            for i, (first, block) in enumerate(pieces):
                after = pieces[i + 1][0] if i + 1 < len(pieces) else end_chunk
                yield Unit(
                    job, job // tiles, block, first, after, chunk_begin(first),
                    min(chunk_begin(after), end), 1 if first == 0 else after - first,
                )  # fmt: skip
            line += cost

    rounds = -(-(num_jobs // lanes) // width)
    if rounds * max(costs) * 100 <= share * SLACK_PERCENT:
        return Deal(list(cut(whole=True)), num_jobs, whole=True)
    chunks = streams * sum(chunk_of(end - 1) + 1 for end in ends if end > 0)
    by_chunk = chunks <= step.num_blocks
    units = list(cut(whole=False))
    if len(units) > max_units or sum(unit.states for unit in units) > max_states:
        return Deal(list(cut(whole=True)), num_jobs, whole=True)
    return Deal(units, num_jobs, whole=False)


@dataclass(frozen=True)
class Traffic:
    """Key blocks that the thread blocks ask for, and those that come from device memory."""

    asked: int
    read: int
    busiest: int  # key blocks of the thread block with the most, one more for each of its units


def simulate(plan: Deal, num_blocks: int, l2_blocks: int) -> Traffic:
    """Walks all thread blocks in step, one key block each at a time, over an L2 cache of that many
    key blocks of which the least recently used goes first."""
    walks: list[list[tuple[int, int]]] = [[] for _ in range(num_blocks)]
    weights = [0] * num_blocks
    for unit in plan.units:
        walks[unit.block] += [(unit.stream, key_block) for key_block in unit.key_blocks]
        weights[unit.block] += len(unit.key_blocks) + 1
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    read = 0
    for step in range(max(map(len, walks), default=0)):
        for walk in walks:
            if step >= len(walk):
                continue
            if walk[step] in held:
                held.move_to_end(walk[step])
                continue
            read += 1
            held[walk[step]] = None
            if len(held) > l2_blocks:
                held.popitem(last=False)
    return Traffic(sum(map(len, walks)), read, max(weights))
