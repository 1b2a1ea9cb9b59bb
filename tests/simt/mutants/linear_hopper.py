"""Mutants of the linear layer for 9.0."""

from __future__ import annotations

from mutants.model import Mutant

HOPPER = "cuda/linear/hopper_linear.cuh"
PICK = "cpp/backend/linear_pick.h"

MUTANTS = [
    Mutant(
        "linear-35",
        "the first x is copied before the kernel that writes it has ended",
        HOPPER,
        "                                          HopperLinearShared<Tile>& shared) {\n"
        "  gpu::grid_dependency_wait();\n",
        "                                          HopperLinearShared<Tile>& shared) {\n",
    ),
    Mutant(
        "linear-36",
        "weights overwrite a stage that is read",
        HOPPER,
        "if (i >= Tile::kStages) gpu::mbarrier_wait(&shared.free[stage], round ^ 1);\n"
        "    gpu::mbarrier_arrive_expect_tx",
        "gpu::mbarrier_arrive_expect_tx",
    ),
    Mutant(
        "linear-37",
        "x overwrites a stage that is read",
        HOPPER,
        "if (i >= Tile::kStages) gpu::mbarrier_wait(&shared.free[stage], round ^ 1);\n#pragma",
        "#pragma",
    ),
    Mutant(
        "linear-38",
        "the second warpgroup reads the columns of the first",
        HOPPER,
        "const int group_lines = group * Tile::kGroupColumns * 128;",
        "const int group_lines = 0;",
    ),
    Mutant(
        "linear-39",
        "a stage is free when one warpgroup has read it",
        HOPPER,
        "gpu::mbarrier_init(&shared.free[stage], Tile::kConsumerWarps);",
        "gpu::mbarrier_init(&shared.free[stage], 4);",
    ),
    Mutant(
        "linear-40",
        "a stage is released while its products run",
        HOPPER,
        "if (!begins) release();",
        "release();",
    ),
    Mutant(
        "linear-41",
        "a chain goes on from the one before",
        HOPPER,
        "multiply(stage, first + i, i == 0, sums, release);",
        "multiply(stage, first + i, first + i == 0, sums, release);",
    ),
    Mutant(
        "linear-42",
        "the last chain is forgotten",
        HOPPER,
        "first < block.stages; first += Tile::kChain",
        "first + Tile::kChain <= block.stages; first += Tile::kChain",
    ),
    Mutant(
        "linear-43",
        "no wait for the products of a chain",
        HOPPER,
        "gpu::wgmma_wait<0>();",
        "gpu::wgmma_wait<1>();",
    ),
    Mutant(
        "linear-44",
        "the tile overwrites the ring that is read",
        HOPPER,
        "gpu::named_barrier_sync(1, Tile::kConsumers);  // all",
        "// all",
    ),
    Mutant(
        "linear-45",
        "the tile is stored before it is whole",
        HOPPER,
        "total[j];\n  }\n  gpu::named_barrier_sync(1, Tile::kConsumers);",
        "total[j];\n  }",
    ),
    Mutant(
        "linear-46",
        "the barriers are told of weights alone",
        HOPPER,
        "weights.bytes(k, block.first_column) + static_cast<unsigned>(block.rows) * "
        "(Tile::kRowPanels * 128));",
        "weights.bytes(k, block.first_column));",
    ),
    Mutant(
        "linear-47",
        "nobody waits until the barriers are made",
        HOPPER,
        "gpu::prefetch_tensor_map(row_map);\n  }\n  __syncthreads();",
        "gpu::prefetch_tensor_map(row_map);\n  }",
    ),
    Mutant(
        "linear-48",
        "every lane of the other loading warp brings x",
        HOPPER,
        "if (gpu::elect_one()) load_rows(block, row_map, shared);",
        "load_rows(block, row_map, shared);",
    ),
    Mutant(
        "linear-49",
        "every slice is the first",
        HOPPER,
        "first_k = static_cast<std::int32_t>(blockIdx.y) * launch.part_depth;",
        "first_k = 0;",
    ),
    Mutant(
        "linear-50",
        "a block's columns are those of one warpgroup",
        HOPPER,
        "first_column = column_tile * Tile::kColumns;",
        "first_column = column_tile * Tile::kGroupColumns;",
    ),
    Mutant(
        "linear-51",
        "the second panel of x is the first",
        HOPPER,
        "i * Tile::kDepth + panel * Tile::kLineDepth, block.first_row);",
        "i * Tile::kDepth, block.first_row);",
    ),
    Mutant(
        "linear-52",
        "rows past the last are described to the copy engine",
        HOPPER,
        "linear_tensor_map(call.x, call.rows, call.depth,",
        "linear_tensor_map(call.x, call.rows + 1, call.depth,",
    ),
    Mutant(
        "linear-53",
        "k past the last is described",
        HOPPER,
        "{static_cast<std::uint64_t>(depth),",
        "{static_cast<std::uint64_t>(depth + 8),",
    ),
    Mutant(
        "linear-54",
        "how k is cut depends on the number of rows",
        PICK,
        "deal.cut = stream_cut(std::max(columns, cut_columns), depth);",
        "deal.cut = stream_cut(rows > 16 ? columns : 8 * columns, depth);",
    ),
    Mutant(
        "linear-55",
        "the family depends on the number of rows",
        PICK,
        "if (problem.depth % 8 != 0 ||",
        "if (problem.rows > 96 || problem.depth % 8 != 0 ||",
    ),
    Mutant(
        "linear-57",
        "rows of the ring that no copy fills stay as they are",
        HOPPER,
        "i < kVectors; i += Tile::kConsumers) {\n      lines[i]",
        "i < 0; i += Tile::kConsumers) {\n      lines[i]",
    ),
    Mutant(
        "linear-58",
        "every block has the rows of a whole tile",
        HOPPER,
        "return (launch.call.rows - 1) / launch.row_tiles + 1;",
        "return launch.call.rows > 64 ? launch.call.rows : 64;",
        tests="emu and (bfloat16 or not float16) and values",
    ),
]
