"""Predicted times of the kernels around attention, of few-row products, and of whole passes."""

from __future__ import annotations

from benchmarks.gpu.cells import AttentionCell, StepCell
from benchmarks.gpu.engine_cells import ModelCell
from benchmarks.gpu.linear import LinearCell
from benchmarks.gpu.machine import Device, Kernel, Prediction, loops_of, slots
from benchmarks.gpu.model_accept import row_op
from benchmarks.gpu.model_attention import attention
from benchmarks.gpu.model_linear import linear_slices, linear_tile


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
    elif cell.kind == "rope_append":
        kernels = (rope_append(cell, device),)
    else:
        kernels = (Kernel(cell.kind, {"HBM": work.memory_us}, start),)
    return Prediction(cell.name, work.floor_us, kernels)


# Instructions for 32 vectors of 8 numbers, rotated and written to 16-bit pages without norms:
# counted by hand along the path, as the recorded loop holds every other way, too.
ROPE_ISSUE = 200


def rope_append(cell: StepCell, device: Device) -> Kernel:
    """Returns what it takes to rotate a step's q and k and to append its k and v.

    Its loads that depend on each other are a request, its length and a page, as for a first load.
    """
    heads = cell.num_heads + 2 * cell.num_kv_heads
    vectors = cell.requests * cell.rows * heads * cell.head_dim / 8
    cycles = vectors / 32 * slots({"issue": ROPE_ISSUE})["issue"] / (4 * device.sms)
    needs = {"HBM": cell.work().memory_us, "issue": cycles / device.clock_hz * 1e6}
    return Kernel(cell.kind, needs, device.launch_us + device.first_load_us)


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


def product(
    rows: int,
    columns: int,
    depth: int,
    device: Device,
    format: str = "bf16",
    leaves_sums: bool = False,
) -> Kernel:
    """Returns the few-row product of a weight [columns, depth], its fold included.

    leaves_sums  what reads the result adds up the sums of slices, so that no kernel has to
    """
    tile = linear_tile(rows, columns, depth, device, format)
    row_tiles, tiles = -(-rows // tile.row_tile), -(-columns // tile.columns)
    slices = linear_slices(columns, depth)
    blocks = row_tiles * tiles * slices
    loop = tile.stage_loop()
    trips = -(-depth // slices // tile.stage_depth)
    turns = -(-blocks // device.sms)  # blocks of the busiest multiprocessor
    cycle = 1e6 / device.clock_hz
    needs = {pipe: turns * trips * tile.groups * c * cycle for pipe, c in slots(loop).items()}
    rate = device.tensor_flops * 2 / tile.row_element  # twice as fast for 8 bits
    needs["tensor"] = (
        turns * trips * tile.groups * loop["tensor_ops"] * device.sms / rate * 1e6
    )  # of one multiprocessor's share
    # A stage is written once and read once by the matrix instructions or the warps that widen it; x
    # by those of each group.
    used = tile.stage_bytes + tile.row_bytes * (tile.groups - 1)
    needs["shared memory"] = turns * trips * (tile.stage_bytes + used) / 128 * cycle
    needs["L2 port"] = turns * trips * tile.stage_bytes / device.l2_bytes_per_cycle * cycle
    weight = columns * depth * tile.weight_bytes / (tile.columns * tile.stage_depth)
    moved = weight * row_tiles + tiles * rows * depth * tile.row_element
    needs["L2"] = moved / device.l2_bytes_per_s * 1e6
    # x was written just before and the result is read just behind: both stay in L2, unless they
    # are a large part of it.
    beside = rows * (columns + depth) * 2.0
    read = weight + (beside if beside > device.l2_bytes / 4 else 0.0)
    needs["HBM"] = read / device.hbm_bytes_per_s * 1e6
    # Every block on a multiprocessor has a ring; x takes its share of what is in flight.
    in_flight = min(blocks, tile.resident * device.sms) * tile.stages * tile.stage_bytes
    needs["latency of memory"] = moved / in_flight * device.memory_latency_us
    # No block of the kernel before leaves room for one of these: the ring fills in the open. Alone
    # on its multiprocessor, every block's does.
    fixed = device.launch_us + device.first_load_us
    if tile.resident == 1:
        fixed += (turns - 1) * device.first_load_us
    if format == "f8_a8":  # a kernel before it rounds x, in two looks with a barrier between them
        fixed += device.launch_us + 2 * device.l2_latency_us + device.barrier_us
    if slices > 1:  # every slice's sums are written and read
        fixed += 2 * slices * rows * columns * 4 / device.l2_bytes_per_s * 1e6
        if not leaves_sums:  # by a second kernel, which writes what is read again
            fixed += device.launch_us + 2 * rows * columns * 2 / device.l2_bytes_per_s * 1e6
    return Kernel("product", needs, fixed)


def linear_cell(cell: LinearCell, device: Device) -> Prediction:
    """Returns the prediction of one product of a step."""
    one = product(cell.rows, cell.columns, cell.depth, device, cell.format)
    return Prediction(cell.name, cell.work().floor_us, (one,))


def model_pass(cell: ModelCell, device: Device, leaves_sums: bool = True) -> Prediction:
    """Returns the prediction of an exact pass: every product, attention, the kernels between.

    leaves_sums  norms and the append add up the sums of products whose k is cut
    """
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
        one = product(rows, *shape, device, leaves_sums=leaves_sums and name != "gate_up")
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
