"""Predicted times of the kernels around attention, of few-row products, and of whole passes."""

from __future__ import annotations

from benchmarks.gpu.cells import MAX_DEPTH, AttentionCell, StepCell
from benchmarks.gpu.engine_cells import ModelCell
from benchmarks.gpu.linear import LinearCell
from benchmarks.gpu.machine import Counts, Device, Kernel, Prediction, loops_of, slots
from benchmarks.gpu.model_attention import attention

ROWS_AHEAD = 4  # rows that are searched before the first is weighed
NODE_US = 0.02  # of one thread that looks at every node in shared memory
WALK_BARRIERS = 4
MMA_SYNC_SHARE = 0.62  # of wgmma's rate on Hopper


def streamed(kernel: str, num_bytes: float, sms: float, device: Device) -> dict[str, float]:
    """Returns what a pass over bytes needs on so many multiprocessors: by the kernel's loop that
    does most for a number it loads."""
    reading = [x["body"] for x in loops_of(kernel) if x["body"].get("load_bytes", 0) >= 16]
    loop = max(reading, key=lambda counts: counts["issue"] / counts["load_bytes"])
    trips = num_bytes / (32 * loop["load_bytes"]) / (4 * sms)  # of each scheduler
    needs = {pipe: trips * c / device.clock_hz * 1e6 for pipe, c in slots(loop).items()}
    return needs | {"HBM": num_bytes / device.hbm_bytes_per_s * 1e6}


def row_laws(rows: int, vocab: int, device: Device) -> tuple[Kernel, ...]:
    """Returns what finds all rows' largest scores, masses and draws (cuda/accept/row_laws.cu).

    Both of its loops pass over every token; only the first reads device memory, and blocks in the
    second do not wait for those in the first but at the beginning and for a row's largest score.
    """
    num_bytes = rows * vocab * 4.0
    found = [x["body"] for x in loops_of("row_laws_kernel<float>") if "convert" not in x["body"]]
    found = [x for x in found if x.get("load_bytes", 0) >= 16]
    search = max(found, key=lambda counts: counts["load_bytes"] / counts["issue"])
    weigh = max(found, key=lambda counts: counts.get("fp32", 0) / counts["load_bytes"])
    needs = {"HBM": num_bytes / device.hbm_bytes_per_s * 1e6}
    needs["L2"] = 2 * num_bytes / device.l2_bytes_per_s * 1e6
    for loop in (search, weigh):
        trips = num_bytes / (32 * loop["load_bytes"]) / (4 * device.sms)
        for pipe, cycles in slots(loop).items():
            needs[pipe] = needs.get(pipe, 0.0) + trips * cycles / device.clock_hz * 1e6
    # The first rows are read before there is anything to weigh; the last row's draw is a chain of
    # four accesses: its pieces counted, masses of chunks, the chunk's scores, the token.
    ahead = min(rows, ROWS_AHEAD) / rows * needs["HBM"]
    fixed = device.launch_us + device.first_load_us + ahead + 4 * device.l2_latency_us
    return (Kernel("clear", {}, device.launch_us), Kernel("laws", needs, fixed))


def step_op(cell: StepCell, device: Device) -> Prediction:
    """Returns the prediction of one of the operations around attention."""
    work = cell.work()
    rows = cell.requests * cell.rows
    start = device.launch_us + device.first_load_us
    row_bytes = cell.vocab * 4.0
    largest = streamed("argmax_kernel<float>", rows * row_bytes, device.sms, device)
    if cell.kind == "argmax":  # its parts are joined by a second kernel
        kernels: tuple[Kernel, ...] = (Kernel("argmax", largest, 2 * start),)
    elif cell.kind in ("sample", "match", "accept"):
        kernels = row_laws(rows, cell.vocab, device)
        # One thread looks for the deepest of the nodes that were kept.
        walk = start
        if cell.kind != "sample":
            walk += cell.rows * NODE_US + WALK_BARRIERS * device.barrier_us
        needs: dict[str, float] = {}
        if cell.kind == "accept":
            # Probabilities of each draft held are added up, and the rejected one's subtracted, by
            # the request's block.
            in_turn = min(MAX_DEPTH, cell.rows - 1, 4) + 2
            needs = streamed("accept_kernel<float>", in_turn * row_bytes, 1, device)
            needs["HBM"] *= cell.requests
        kernels = (*kernels, Kernel(cell.kind, needs, walk))
    else:
        kernels = (Kernel(cell.kind, {"HBM": work.memory_us}, start),)
    return Prediction(cell.name, work.floor_us, kernels)


ENTERING_THREADS = 512  # of the block that indexes a prompt (cuda/step/commit_step.cu)


def enter_prompt(tokens: int, max_len: int, lengths: int, device: Device) -> Kernel:
    """Returns what it takes to index a prompt's patterns of 1 to ``lengths`` tokens.

    A block clears the tables, then each of its threads takes one position after another: the token
    there, the entries of all patterns that end there at once, and for each of them the text it is
    compared with are accesses that wait for one another. Then all entries are looked at once more.
    """
    entries = 16
    while entries < 2 * max_len:
        entries *= 2
    table_us = lengths * entries * 12 / device.l2_bytes_per_cycle / device.clock_hz * 1e6
    waits = -(-tokens // ENTERING_THREADS) * (2 + lengths) * device.l2_latency_us
    start = device.launch_us + device.first_load_us
    return Kernel("commit", {"L2 port": 2 * table_us}, start + waits)


LINEAR_TILES = ((8, 32), (16, 32), (32, 128), (64, 128), (128, 128))  # rows, columns of a block
ENOUGH_BLOCKS = 120


def linear_units(blocks: int, narrow: bool, depth: int) -> int:
    """Returns into how many units the depth of a product is cut (cuda/linear/linear_plan.h)."""
    groups = max(1, (depth - 1) // 4096 + 1)
    if narrow:
        return 1 if groups == 1 or blocks >= ENOUGH_BLOCKS else groups
    return groups if blocks * groups >= ENOUGH_BLOCKS or depth <= 64 else 4 * groups


def chunk_of_product(found: list[Counts], row_tile: int) -> Counts:
    """Returns what a warp does for a chunk of 64 of the depth: its products, and the loop around
    them that copies where they are in a loop of their own."""
    products = max(found, key=lambda counts: counts.get("tensor_ops", 0))
    trips, rest = divmod(2 * 32 * min(row_tile, 32) * 64, products["tensor_ops"])
    if rest:
        raise ValueError(f"{products}: not a part of the products of a chunk")
    if trips == 1:
        return products
    around = max(found, key=lambda counts: counts.get("load_bytes", 0))
    return {
        name: trips * products.get(name, 0) + around.get(name, 0) for name in {*products, *around}
    }


def product(rows: int, columns: int, depth: int, device: Device) -> Kernel:
    """Returns the few-row product of a weight [columns, depth], its fold included."""
    row_tile, column_tile = next(t for t in LINEAR_TILES if rows <= t[0] or t[0] == 128)
    narrow = column_tile == 32
    name = f"linear_kernel<LinearConfig<bf16, {row_tile}, {str(narrow).lower()}> >"
    loop = chunk_of_product([loop["body"] for loop in loops_of(name)], row_tile)
    tiles = -(-rows // row_tile)
    flops = 2.0 * row_tile * tiles * columns * depth
    trips = flops / loop["tensor_ops"] / device.sms  # of a warp, on each multiprocessor
    cycle = 1e6 / device.clock_hz
    needs = {pipe: trips / 4 * cycles * cycle for pipe, cycles in slots(loop).items()}
    # What is copied is written to shared memory too.
    needs["shared memory"] = trips * (loop["shared_bytes"] + loop["load_bytes"]) * 32 / 128 * cycle
    needs["tensor"] = flops / (device.tensor_flops * MMA_SYNC_SHARE) * 1e6
    needs["HBM"] = columns * depth * 2 / device.hbm_bytes_per_s * 1e6
    tiled = -(-columns // column_tile) * tiles
    units = linear_units(tiled, narrow, depth)
    blocks = tiled * units
    if not narrow:  # one block of these fits a multiprocessor: the last wave is not full
        waves = -(-blocks // device.sms)
        needs = {name: us * waves * device.sms / blocks for name, us in needs.items()}
    fold_us = 0.0
    if units > 1:  # every unit's sums are written and read by a second kernel
        fold_us = 2 * units * rows * columns * 4 / device.l2_bytes_per_s * 1e6 + device.launch_us
    return Kernel("product", needs, device.launch_us + fold_us)


def linear_cell(cell: LinearCell, device: Device) -> Prediction:
    """Returns the prediction of one product of a step."""
    one = product(cell.rows, cell.columns, cell.depth, device)
    return Prediction(cell.name, cell.work().floor_us, (one,))


def model_pass(cell: ModelCell, device: Device) -> Prediction:
    """Returns the prediction of an exact pass: every product, attention, the kernels between."""
    rows = cell.requests * cell.rows
    q, kv = cell.num_heads * cell.head_dim, cell.num_kv_heads * cell.head_dim
    shapes = {
        "qkv": (q + 2 * kv, cell.hidden),
        "o": (cell.hidden, q),
        "gate_up": (2 * cell.intermediate, cell.hidden),
        "down": (cell.hidden, cell.intermediate),
    }
    found = []
    for name, shape in shapes.items():
        one = product(rows, *shape, device)
        scaled = {key: us * cell.layers for key, us in one.needs.items()}
        found.append(Kernel(name, scaled, one.fixed_us * cell.layers))
    attends = attention(
        AttentionCell(
            cell.requests, cell.rows, cell.context, cell.num_kv_heads, cell.num_heads, cell.head_dim
        ),
        device,
    )
    plan, *others = attends.kernels  # planned once for all layers
    for kernel in others:
        scaled = {key: us * cell.layers for key, us in kernel.needs.items()}
        found.append(Kernel(kernel.name, scaled, kernel.fixed_us * cell.layers))
    # Two norms, the gate, RoPE with append: a few rows each, so launch and a load.
    between = 4 * cell.layers * device.launch_us
    head = product(rows, cell.vocab, cell.hidden, device)
    argmax = step_op(StepCell("argmax", cell.requests, cell.rows, vocab=cell.vocab), device)
    kernels = (plan, *found, Kernel("between", {}, between), head, *argmax.kernels)
    return Prediction(cell.name, cell.work().floor_us, kernels)
