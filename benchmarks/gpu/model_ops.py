"""Predicted times of the kernels around attention, of few-row products, and of whole passes."""

from __future__ import annotations

from benchmarks.gpu.cells import AttentionCell, StepCell
from benchmarks.gpu.engine_cells import ModelCell
from benchmarks.gpu.linear import LinearCell
from benchmarks.gpu.machine import Counts, Device, Kernel, Prediction, loops_of, slots
from benchmarks.gpu.model_accept import row_op
from benchmarks.gpu.model_attention import attention
from benchmarks.gpu.model_packed import packed_product


def streamed(kernel: str, num_bytes: float, sms: float, device: Device) -> dict[str, float]:
    """Returns what a pass over bytes needs on so many multiprocessors: by the kernel's loop that
    does most for a number it loads."""
    reading = [x["body"] for x in loops_of(kernel) if x["body"].get("load_bytes", 0) >= 16]
    loop = max(reading, key=lambda counts: counts["issue"] / counts["load_bytes"])
    trips = num_bytes / (32 * loop["load_bytes"]) / (4 * sms)  # of each scheduler
    needs = {pipe: trips * c / device.clock_hz * 1e6 for pipe, c in slots(loop).items()}
    return needs | {"HBM": num_bytes / device.hbm_bytes_per_s * 1e6}


def step_op(cell: StepCell, device: Device, cut: str = "") -> Prediction:
    """Returns the prediction of one of the operations around attention.

    cut   what the laws of "sample" and "match" cut off, as for ``model_accept.row_laws``
    """
    work = cell.work()
    rows = cell.requests * cell.rows
    start = device.launch_us + device.first_load_us
    row_bytes = cell.vocab * 4.0
    largest = streamed("argmax_kernel<float>", rows * row_bytes, device.sms, device)
    if cell.kind == "argmax":  # its parts are joined by a second kernel
        kernels: tuple[Kernel, ...] = (Kernel("argmax", largest, 2 * start),)
    elif cell.kind in ("sample", "match", "accept"):
        kernels = row_op(cell, device, cut)
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


# cpp/backend/linear_op.h and linear_instances.h: rows of x in a tile, columns of a block, stages.
LINEAR_TILES = (
    (8, 64, 6), (16, 64, 5), (32, 64, 4), (64, 64, 7), (64, 128, 9), (96, 64, 5), (96, 128, 8),
    (128, 64, 4), (128, 128, 7),
)  # fmt: skip
LINEAR_COLUMNS, CHAIN = 64, 1024
PANEL = 64  # k of one tensor copy


def linear_slices(columns: int, depth: int) -> int:
    """Returns into how many slices the depth of a product is cut (stream_cut)."""
    tiles, slices = -(-columns // LINEAR_COLUMNS), 1
    while slices < 8 and tiles * slices < 96 and depth // (2 * slices) >= CHAIN:
        slices *= 2
    return slices


def linear_tile(rows: int, columns: int, depth: int, device: Device) -> tuple[int, int, int]:
    """Returns the kernel that serves a product (pick_linear in cpp/backend/linear_pick.h)."""
    row_tile = next((t[0] for t in LINEAR_TILES if rows <= t[0]), LINEAR_TILES[-1][0])
    narrow, *wide = (t for t in LINEAR_TILES if t[0] == row_tile)
    slices = linear_slices(columns, depth)
    for tile in wide:
        if -(-rows // row_tile) * -(-columns // tile[1]) * slices >= device.sms:
            return tile
    return narrow


def stage_of_product(row_tile: int, columns: int) -> tuple[Counts, int]:
    """Returns what a consuming warpgroup does for a stage, the loop that multiplies it, and how
    many k the stage has."""
    stage_depth = 2 * PANEL if row_tile <= 32 else PANEL
    groups = columns // LINEAR_COLUMNS
    name = f"hopper_linear_kernel<bf16, HopperLinearTile<{row_tile}, {groups}> >"
    products = 2 * LINEAR_COLUMNS * row_tile * stage_depth
    found = [x["body"] for x in loops_of(name) if x["body"].get("tensor_ops", 0) > 0]
    if len(found) != 1 or found[0]["tensor_ops"] != products:
        raise ValueError(f"{name}: no loop of {products} operations a trip")
    return found[0], stage_depth


def product(rows: int, columns: int, depth: int, device: Device) -> Kernel:
    """Returns the few-row product of a weight [columns, depth], its fold included."""
    row_tile, block_columns, stages = linear_tile(rows, columns, depth, device)
    row_tiles, tiles = -(-rows // row_tile), -(-columns // block_columns)
    groups = block_columns // LINEAR_COLUMNS
    each = 2 if groups == 1 else 1  # blocks that a multiprocessor has room for
    slices = linear_slices(columns, depth)
    blocks = row_tiles * tiles * slices
    loop, stage_depth = stage_of_product(row_tile, block_columns)
    trips = -(-depth // slices // stage_depth)
    turns = -(-blocks // device.sms)  # blocks of the busiest multiprocessor
    cycle = 1e6 / device.clock_hz
    needs = {pipe: turns * trips * c * cycle for pipe, c in slots(loop).items()}
    needs["tensor"] = (
        turns * trips * groups * loop["tensor_ops"] * device.sms / device.tensor_flops * 1e6
    )  # of one multiprocessor's share
    # A stage is written once and read once by the matrix instructions; x by those of each group.
    stage_bytes = stage_depth * 2 * (block_columns + row_tile)
    read = stage_bytes + stage_depth * 2 * row_tile * (groups - 1)
    needs["shared memory"] = turns * trips * (stage_bytes + read) / 128 * cycle
    needs["L2 port"] = turns * trips * stage_bytes / device.l2_bytes_per_cycle * cycle
    weight = columns * depth * 2.0
    needs["L2"] = (weight * row_tiles + tiles * rows * depth * 2) / device.l2_bytes_per_s * 1e6
    # x was written just before and the result is read just behind: both stay in L2, unless they
    # are a large part of it.
    beside = rows * (columns + depth) * 2.0
    read = weight + (beside if beside > device.l2_bytes / 4 else 0.0)
    needs["HBM"] = read / device.hbm_bytes_per_s * 1e6
    # Two blocks on a multiprocessor have two rings; x takes its share of what is in flight.
    in_flight = min(blocks, each * device.sms) * stages * stage_bytes
    moved = weight * row_tiles + tiles * rows * depth * 2
    needs["latency of memory"] = moved / in_flight * device.memory_latency_us
    # No block of the kernel before leaves room for one of these: the ring fills in the open. Alone
    # on its multiprocessor, every block's does.
    fixed = device.launch_us + device.first_load_us
    if each == 1:
        fixed += (turns - 1) * device.first_load_us
    if slices > 1:  # every slice's sums are written and read by a second kernel
        fixed += 2 * slices * rows * columns * 4 / device.l2_bytes_per_s * 1e6 + device.launch_us
    return Kernel("product", needs, fixed)


def linear_cell(cell: LinearCell, device: Device) -> Prediction:
    """Returns the prediction of one product of a step."""
    if cell.format == "bf16":
        one = product(cell.rows, cell.columns, cell.depth, device)
    else:
        one = packed_product(cell, device)
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
