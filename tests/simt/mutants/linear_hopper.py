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
        "  if (launch.call.constant_weight) gpu::grid_dependency_wait();\n\n  int stage",
        "\n  int stage",
    ),
    Mutant(
        "linear-36",
        "weights overwrite a stage that is read",
        HOPPER,
        "gpu::mbarrier_wait(&shared.free[stage], round ^ 1);",
        "",
    ),
    Mutant(
        "linear-37",
        "x overwrites a stage that another block reads",
        HOPPER,
        "gpu::mbarrier_wait(&shared.rows_free[stage], parities >> stage & 1);",
        "",
    ),
    Mutant(
        "linear-38",
        "the parity of another stage",
        HOPPER,
        "parities ^= 1u << stage;",
        "parities ^= 1u;",
    ),
    Mutant(
        "linear-39",
        "the turn of the block after",
        HOPPER,
        "if (++filler == block.cluster) filler = 0;",
        "",
    ),
    Mutant(
        "linear-40",
        "a stage is released while its products run",
        HOPPER,
        "if (i > 0) release();",
        "release();",
    ),
    Mutant(
        "linear-41",
        "a chain goes on from the one before",
        HOPPER,
        "step > 0 || i > 0)",
        "step > 0 || first + i > 0)",
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
        "a block ends while others use its memory",
        HOPPER,
        "  __syncwarp();\n  if (Tile::kCluster > 1 && cluster > 1) gpu::cluster_sync();\n",
        "",
        harmless="a block is told that x was read only where it waits for that before it brings "
        "more, and x that is brought to it is waited for: the emulator's rule for ends says so",
    ),
    Mutant(
        "linear-47",
        "blocks meet alone before they use each other's barriers",
        HOPPER,
        "      gpu::cluster_sync();\n    } else {\n      __syncthreads();",
        "      __syncthreads();\n    } else {\n      __syncthreads();",
    ),
    Mutant(
        "linear-48",
        "x goes to all blocks but the last",
        HOPPER,
        "(1u << block.cluster) - 1);",
        "(1u << (block.cluster - 1)) - 1);",
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
        "the columns of the first block of a cluster",
        HOPPER,
        "(group * cluster + rank) * Tile::kColumns",
        "(group * cluster) * Tile::kColumns",
    ),
    Mutant(
        "linear-51",
        "the second panel of x is the first",
        HOPPER,
        "i * kStreamDepth + panel * Tile::kPanelDepth;",
        "i * kStreamDepth;",
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
]
