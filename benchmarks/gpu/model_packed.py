"""Predicted times of products with weights of 8 and 4 bits, which the tiles kernel makes."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.linear import LinearCell
from benchmarks.gpu.machine import Counts, Device, Kernel, loops_of, slots

# WeightFormat of cpp/backend/packed_weight.h, and bytes of a tile of 32 columns by 64 k.
FORMATS = {"q8_0": (1, 2176), "q4_0": (2, 1152), "q4_1": (3, 1280), "q4_g": (4, 1280),
           "q4_k": (5, 1536), "q8_g": (6, 2176), "q5_k": (7, 2560), "q6_k": (8, 2560),
           "f8_g": (9, 2176)}  # fmt: skip
# kLinearTiles of cuda/linear/linear_plan.h: rows, columns, do warps split k?
TILES = ((8, 32, True), (16, 32, True), (32, 128, False), (64, 128, False), (128, 128, False))
CHUNK, GROUP_DEPTH, GROUP_PARTS, ENOUGH_BLOCKS = 64, 4096, 4, 120
MOST_SHARED, WARP_ROWS = 99 << 10, 64
MMA_SHARE = 0.6  # of the rate of wgmma, which mma.sync reaches on 9.0: assumed


@dataclass(frozen=True)
class Deal:
    """How a product is cut (plan_linear and LinearConfig).

    trips      stages of 64 k that a warp multiplies in a block
    rings      of a block; a stage has stage_bytes, weight_bytes of them weights
    resident   blocks on a multiprocessor
    """

    row_tile: int
    is_narrow: bool
    row_tiles: int
    column_tiles: int
    units: int
    warps: int
    trips: int
    rings: int
    stages: int
    stage_bytes: int
    weight_bytes: int
    resident: int

    @property
    def blocks(self) -> int:
        return self.row_tiles * self.column_tiles * self.units


def deal(rows: int, columns: int, depth: int, format: str) -> Deal:
    """Returns how a product of a weight [columns, depth] is cut."""
    row_tile, column_tile, is_narrow = next((t for t in TILES if rows <= t[0]), TILES[-1])
    row_tiles, column_tiles = -(-rows // row_tile), -(-columns // column_tile)
    groups = -(-depth // GROUP_DEPTH)
    parts = groups * GROUP_PARTS
    part = -(-depth // parts)
    part_chunks = -(-part // CHUNK)
    blocks = row_tiles * column_tiles
    if is_narrow:
        in_unit = parts if groups == 1 or blocks >= ENOUGH_BLOCKS else GROUP_PARTS
    else:
        enough = blocks * groups >= ENOUGH_BLOCKS or depth <= CHUNK
        in_unit = GROUP_PARTS if enough else 1
    warps = 4 if row_tile <= WARP_ROWS else 8
    rings = warps if is_narrow else 1
    weight_bytes = column_tile // 32 * FORMATS[format][1]
    stage_bytes = weight_bytes + row_tile * 2 * CHUNK
    parts_bytes = 4 * 2 * (row_tile // 8) * 4 * 32 * 4 if is_narrow else 0
    stages = min(10, (MOST_SHARED - parts_bytes) // (rings * stage_bytes))
    return Deal(
        row_tile=row_tile,
        is_narrow=is_narrow,
        row_tiles=row_tiles,
        column_tiles=column_tiles,
        units=parts // in_unit,
        warps=warps,
        trips=part_chunks * in_unit // (GROUP_PARTS if is_narrow else 1),
        rings=rings,
        stages=stages,
        stage_bytes=stage_bytes,
        weight_bytes=weight_bytes,
        resident=1 if row_tile > WARP_ROWS else 2,  # registers, shared memory
    )


def stage_loop(how: Deal, format: str) -> Counts:
    """Returns what a warp does for a stage: the loop that multiplies it."""
    kind, narrow = FORMATS[format][0], "true" if how.is_narrow else "false"
    weights = f"PackedWeights<bf16, (WeightFormat){kind}>"
    name = f"linear_kernel<LinearConfig<{weights}, {how.row_tile}, {narrow}> >"
    products = 2 * 32 * min(how.row_tile, WARP_ROWS) * CHUNK
    found = [x["body"] for x in loops_of(name) if x["body"].get("tensor_ops", 0) > 0]
    if not found or any(x["tensor_ops"] != products for x in found):
        raise ValueError(f"{name}: no loop of {products} operations a trip")
    return max(found, key=lambda counts: counts["issue"])


def packed_product(cell: LinearCell, device: Device) -> Kernel:
    """Returns the product of a packed weight, its fold included."""
    rows, columns, depth = cell.rows, cell.columns, cell.depth
    how = deal(rows, columns, depth, cell.format)
    loop = stage_loop(how, cell.format)
    cycle = 1e6 / device.clock_hz
    # The busiest multiprocessor: all of its blocks' stages, over its schedulers.
    trips = -(-how.blocks // device.sms) * how.warps * how.trips
    needs = {pipe: trips / 4 * c * cycle for pipe, c in slots(loop).items()}
    rate = device.tensor_flops * MMA_SHARE / device.sms
    needs["tensor"] = trips * loop["tensor_ops"] / rate * 1e6
    filled = trips / how.warps * how.rings * how.stage_bytes
    read = trips * 32 * loop["shared_bytes"]
    needs["shared memory"] = (filled + read) / 128 * cycle
    needs["L2 port"] = filled / device.l2_bytes_per_cycle * cycle
    needs["HBM"] = cell.weight_bytes / device.hbm_bytes_per_s * 1e6
    crossing = cell.weight_bytes * how.row_tiles + how.column_tiles * rows * depth * 2
    needs["L2"] = crossing / device.l2_bytes_per_s * 1e6
    running = min(how.blocks, device.sms * how.resident)
    in_flight = running * how.rings * (how.stages - 1) * how.weight_bytes
    needs["latency of memory"] = cell.weight_bytes / in_flight * device.memory_latency_us
    fixed = device.launch_us + device.first_load_us
    if how.units > 1:  # every unit's sums are written and read by a second kernel
        sums = how.units * rows * columns * 4
        fixed += 2 * sums / device.l2_bytes_per_s * 1e6 + device.launch_us
    return Kernel("product", needs, fixed)
