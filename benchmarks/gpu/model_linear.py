"""The kernels of the linear layer for 9.0, as the model sees them: 16-bit and packed weights."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.machine import Counts, Device, loops_of

# WeightFormat of cpp/backend/packed_weight.h, and bytes of a tile of 32 columns by 64 k.
FORMATS = {"q8_0": (1, 2176), "q4_0": (2, 1152), "q4_1": (3, 1280), "q4_g": (4, 1280),
           "q4_k": (5, 1536), "q8_g": (6, 2176), "q5_k": (7, 2560), "q6_k": (8, 2560),
           "f8_g": (9, 2176), "f8_a8": (10, 2176)}  # fmt: skip
# linear_instances.h and kPackedTiles of linear_pick.h: rows of x in a tile, columns of a block.
LINEAR_TILES = ((8, 64), (16, 64), (32, 64), (32, 256), (64, 64), (64, 128), (64, 256), (96, 64),
                (96, 128), (96, 256), (128, 64), (128, 128))  # fmt: skip
PACKED_TILES = ((8, 64), (32, 64), (64, 64), (64, 128), (96, 64), (96, 128), (128, 128))
LINEAR_COLUMNS, CHAIN, ENOUGH_BLOCKS = 64, 1024, 256
PANEL = 64  # k of one tensor copy


@dataclass(frozen=True)
class Tile:
    """A kernel (hopper_linear_tile.h). stage_bytes: of a stage's weights and x; resident: blocks on
    a multiprocessor."""

    row_tile: int
    columns: int
    format: str

    @property
    def groups(self) -> int:
        return self.columns // LINEAR_COLUMNS

    @property
    def resident(self) -> int:
        few_rows = self.format != "bf16" and self.row_tile <= 32
        return 1 if self.groups > 1 else 4 if few_rows else 2

    @property
    def stage_depth(self) -> int:
        large = self.row_tile > 32 or self.groups > 1
        return PANEL if self.format == "bf16" and large else 2 * PANEL

    @property
    def weight_bytes(self) -> int:
        columns = PANEL * 2 if self.format == "bf16" else FORMATS[self.format][1] / 32
        return int(self.stage_depth // PANEL * self.columns * columns)

    @property
    def row_element(self) -> int:
        """Returns the bytes of an element of x."""
        return 1 if self.format == "f8_a8" else 2

    @property
    def row_bytes(self) -> int:
        return self.stage_depth * self.row_element * self.row_tile

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + self.row_bytes

    @property
    def stages(self) -> int:
        room = ((228 << 10) // self.resident - 1024) // 1024 * 1024 - 512
        return min(12, room // self.stage_bytes)

    @property
    def kernel(self) -> str:
        shape = f"{self.row_tile}, {self.groups}"
        if self.format == "bf16":
            return f"hopper_linear_kernel<bf16, HopperLinearTile<{shape}> >"
        if self.format == "f8_a8":
            return f"hopper_e4m3_kernel<bf16, HopperE4m3Tile<{shape}> >"
        kind = f"(WeightFormat){FORMATS[self.format][0]}"
        return f"hopper_packed_kernel<bf16, {kind}, HopperPackedTile<{kind}, {shape}> >"

    def stage_loop(self) -> Counts:
        """Returns what a consuming warpgroup does for a stage: the loop that multiplies it."""
        products = 2 * LINEAR_COLUMNS * self.row_tile * self.stage_depth
        found = [x["body"] for x in loops_of(self.kernel) if x["body"].get("tensor_ops", 0) > 0]
        if len(found) != 1 or found[0]["tensor_ops"] != products:
            raise ValueError(f"{self.kernel}: no loop of {products} operations a trip")
        return found[0]


def linear_slices(columns: int, depth: int) -> int:
    """Returns into how many slices the depth of a product is cut (stream_cut)."""
    tiles, slices = -(-columns // LINEAR_COLUMNS), 1
    while slices < 8 and tiles * slices < ENOUGH_BLOCKS and depth // (2 * slices) >= CHAIN:
        slices *= 2
    return slices


def linear_tile(rows: int, columns: int, depth: int, device: Device, format: str) -> Tile:
    """Returns the kernel that serves a product (pick_linear, pick_packed)."""
    tiles = LINEAR_TILES if format == "bf16" else PACKED_TILES
    row_tile = next((t[0] for t in tiles if rows <= t[0]), tiles[-1][0])
    narrow, *wide = (Tile(*t, format) for t in tiles if t[0] == row_tile)
    slices = linear_slices(columns, depth)
    element = narrow.weight_bytes / (narrow.columns * narrow.stage_depth)
    row_tiles = -(-rows // row_tile)

    def intake(tile: Tile) -> float:
        """Returns bytes of the busiest multiprocessor, for a k of a slice."""
        turns = -(-row_tiles * -(-columns // tile.columns) * slices // device.sms)
        return turns * (tile.columns * element + -(-rows // row_tiles) * tile.row_element)

    best = narrow
    for tile in wide:
        if 2 * intake(best) * device.sms <= 3 * columns * slices * element:
            break  # memory is slower
        if tile.columns > 128 and slices > 1:
            break  # slices are too short for such a block
        if intake(tile) < intake(best):
            best = tile
    return best
