"""Mutants of products whose inputs are rounded to e4m3."""

from __future__ import annotations

from mutants.model import Mutant

PRODUCT = "cuda/linear/hopper_e4m3.cuh"
ROWS = "cuda/linear/e4m3_rows.cu"
RULE = "cpp/algo/e4m3_row.h"
SUMS = "cuda/linear/sums.cuh"
LINEAR = "cuda/linear/linear.cu"
STREAM = "cuda/linear/hopper_linear.cuh"
PACKED = "cuda/linear/hopper_packed.cuh"

MUTANTS = [
    Mutant(
        "e4m3-1",
        "the operand has both columns' numbers in one register",
        PRODUCT,
        "__byte_perm(numbers.x, numbers.y, 0x5410u)",
        "numbers.x",
    ),
    Mutant(
        "e4m3-2",
        "the columns of a lane change places",
        PRODUCT,
        "a[half][1] = __byte_perm(numbers.x, numbers.y, 0x7632u)",
        "a[half][1] = __byte_perm(numbers.x, numbers.y, 0x5410u)",
    ),
    Mutant(
        "e4m3-3",
        "the second 32 k are the first",
        PRODUCT,
        "(fragment * 2 + half) * 32 + lane",
        "(fragment * 2) * 32 + lane",
    ),
    Mutant(
        "e4m3-4",
        "scales of the tile's first 16 columns for all",
        PRODUCT,
        "lane / 4 * 4 +\n                      fragment * 2",
        "lane / 4 * 4",
    ),
    Mutant(
        "e4m3-5",
        "both of a lane's columns have one scale",
        PRODUCT,
        "weights[panel].scales[j / 2 % 2]",
        "weights[panel].scales[0]",
    ),
    Mutant(
        "e4m3-6",
        "a tile's scale is the first tile's",
        PRODUCT,
        "weights[panel].scales[j",
        "weights[0].scales[j",
    ),
    Mutant(
        "e4m3-7",
        "sums of a tile go on from the one before",
        PRODUCT,
        "panel * 64 + half * 32), half > 0)",
        "panel * 64 + half * 32), half + panel > 0)",
    ),
    Mutant(
        "e4m3-8",
        "x of the first 64 k for all",
        PRODUCT,
        "panel * 64 + half * 32",
        "half * 32",
    ),
    Mutant(
        "e4m3-9",
        "sums are read before the tensor cores have written them",
        PRODUCT,
        "gpu::wgmma_wait<0>()",
        "gpu::wgmma_wait<1>()",
    ),
    Mutant(
        "e4m3-10",
        "tiles that do not exist are read",
        PRODUCT,
        "i * Tile::kPanels + panel < tiles.count",
        "true",
    ),
    Mutant(
        "e4m3-11",
        "a stage is never handed back",
        PRODUCT,
        "if (tiles.lane == 0) gpu::mbarrier_arrive(&shared.free[stage]);",
        "",
        tests="emu and not fast and values",
    ),
    Mutant(
        "e4m3-12",
        "x in the order of k",
        ROWS,
        "e4m3_code(v[2 * t]) | e4m3_code(v[2 * t + 1]) << 8",
        "e4m3_code(v[4 * t]) | e4m3_code(v[4 * t + 1]) << 8",
    ),
    Mutant(
        "e4m3-13",
        "the halves of 16 k change places",
        ROWS,
        "e4m3_code(v[8 + 2 * t]) << 16",
        "e4m3_code(v[2 * t]) << 16",
    ),
    Mutant(
        "e4m3-14",
        "the largest of a row by its first warp",
        ROWS,
        "largest = of_warps[w] > largest ? of_warps[w] : largest",
        "largest = of_warps[0]",
    ),
    Mutant(
        "e4m3-15",
        "nobody waits for the other warps' largest",
        ROWS,
        "  __syncthreads();\n#pragma unroll\n  for (int w",
        "#pragma unroll\n  for (int w",
    ),
    Mutant(
        "e4m3-16",
        "signs count in the largest",
        ROWS,
        "__float_as_uint(v[i]) & 0x7fffffffu",
        "__float_as_uint(v[i])",
    ),
    Mutant(
        "e4m3-17",
        "rows are rounded before the kernel that writes them has ended",
        ROWS,
        "  gpu::grid_dependency_wait();\n",
        "",
    ),
    Mutant(
        "e4m3-18",
        "what lies behind the last k is not zeroed",
        ROWS,
        "kOrder == E4m3Order::kOfProducts ? e4m3_pitch(call.depth) : call.depth",
        "call.depth",
    ),
    Mutant(
        "e4m3-19",
        "the scale is the largest itself",
        RULE,
        "largest / kE4m3Largest",
        "largest",
    ),
    Mutant(
        "e4m3-21",
        "numbers of two bits",
        RULE,
        "+ 20) << 23",
        "+ 21) << 23",
    ),
    Mutant(
        "e4m3-22",
        "subnormal numbers of half a step",
        RULE,
        "least = 127 - 6",
        "least = 127 - 7",
    ),
    Mutant(
        "e4m3-23",
        "the rows' scales are left out",
        SUMS,
        "if (row_scales != nullptr) {",
        "if (false) {",
    ),
    Mutant(
        "e4m3-24",
        "every row has the first row's scale",
        SUMS,
        "row_scales[row]",
        "row_scales[0]",
    ),
    Mutant(
        "e4m3-25",
        "a later launch begins with the first row's scale",
        LINEAR,
        "p.row_scales + first",
        "p.row_scales",
    ),
    Mutant(
        "e4m3-26",
        "numbers and scales overlap",
        LINEAR,
        "static_cast<char*>(p.exec.workspace) + numbers)",
        "static_cast<char*>(p.exec.workspace) + numbers / 2)",
    ),
    Mutant(
        "e4m3-27",
        "partial sums where the rounded rows are",
        LINEAR,
        "part.exec.workspace = static_cast<char*>(p.exec.workspace) + used",
        "part.exec.workspace = static_cast<char*>(p.exec.workspace)",
    ),
    Mutant(
        "e4m3-28",
        "barriers wait for as many bytes of x as of 16 bits",
        STREAM,
        "(Tile::kRowPanels * 128));",
        "(Tile::kPanels * 128));",
        tests="emu and not fast and values",
    ),
    Mutant(
        "e4m3-29",
        "room for the sums of one row alone, whose tile is another",
        LINEAR,
        "const std::int64_t sums = most_sums_of_a_row(p.columns, p.depth);",
        "const std::int64_t sums = scratch_of_sums(1, p.columns, p.depth).needed;",
        tests="leave_room and emu",
    ),
    Mutant(
        "e4m3-30",
        "all columns are the strip's first",
        PACKED,
        "weights + (strip * Tile::kPanels + panel) * kTileBytes",
        "weights + panel * kTileBytes",
    ),
]
