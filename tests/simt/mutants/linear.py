"""Mutants of the linear layer of a few rows."""

from __future__ import annotations

from mutants.model import Mutant

MATRIX = "cuda/linear/linear.cuh"
CONFIG = "cuda/linear/linear_config.cuh"
PLAN = "cuda/linear/linear_plan.h"
HOST = "cuda/linear/linear.cu"
PLAIN = "cuda/linear/plain.cuh"
CUT = "cpp/backend/linear_op.h"
LAUNCH = "cuda/linear/linear_launch.cuh"
SUMS = "cuda/linear/sums.cuh"
ELEMENTS = "cuda/linear/element_weights.cuh"

MUTANTS = [
    Mutant(
        "linear-1",
        "one group of copies too few waited for",
        MATRIX,
        "gpu::cp_async_wait<kAhead - 1>();",
        "gpu::cp_async_wait<kAhead>();",
    ),
    Mutant(
        "linear-2",
        "no barrier between the copies and their reading",
        MATRIX,
        "sync_ring<Config>();  // all",
        "// all",
    ),
    Mutant(
        "linear-3",
        "the group's parts are overwritten before all are read",
        MATRIX,
        "if (first != block.first_part) __syncthreads();",
        "",
    ),
    Mutant(
        "linear-4",
        "no barrier before the fold of a group",
        MATRIX,
        "(&sums.at[0][0][0])[i];\n      }\n      __syncthreads();",
        "(&sums.at[0][0][0])[i];\n      }",
    ),
    Mutant(
        "linear-5",
        "a narrow tile overwrites rings that are read",
        MATRIX,
        "gpu::cp_async_wait<0>();\n    __syncthreads();  // the rings are read",
        "gpu::cp_async_wait<0>();\n    // the rings are read",
        harmless="the barrier of the last group's fold stands between the last read and the tile",
    ),
    Mutant(
        "linear-6",
        "a wide tile overwrites the ring that is read",
        MATRIX,
        "gpu::cp_async_wait<0>();\n    __syncthreads();  // as above",
        "gpu::cp_async_wait<0>();",
    ),
    Mutant(
        "linear-7",
        "the tile is stored before it is whole",
        MATRIX,
        "__syncthreads();\n  store_tile<Config>",
        "store_tile<Config>",
    ),
    Mutant(
        "linear-8",
        "rows past the last are read",
        MATRIX,
        "inside && i * kLines < rows",
        "inside",
    ),
    Mutant(
        "linear-9",
        "columns past the last are read",
        ELEMENTS,
        "column < call.columns && at < call.depth",
        "at < call.depth",
    ),
    Mutant(
        "linear-10",
        "k past the last of a row is read",
        ELEMENTS,
        "column < call.columns && at < call.depth",
        "column < call.columns",
    ),
    Mutant(
        "linear-11",
        "a part's copies go on into the next part",
        MATRIX,
        "static_cast<std::uint32_t>(length + kLinearChunk - 1) / kLinearChunk",
        "static_cast<std::uint32_t>(length + kLinearChunk) / kLinearChunk",
    ),
    Mutant(
        "linear-12",
        "a part's last chunk forgotten where it is cut",
        MATRIX,
        "static_cast<std::uint32_t>(length + kLinearChunk - 1) / kLinearChunk",
        "static_cast<std::uint32_t>(length) / kLinearChunk",
    ),
    Mutant(
        "linear-13",
        "the second group's sums replace the first's",
        MATRIX,
        "total[f] = first == block.first_part ? group : total[f] + group;",
        "total[f] = group;",
    ),
    Mutant(
        "linear-14",
        "groups walked by one block are folded as one long group",
        MATRIX,
        "float group = parts[element];",
        "float group = (first == block.first_part ? 0.0f : total[f]) + parts[element];\n"
        "        total[f] = 0.0f;",
    ),
    Mutant(
        "linear-15",
        "the sums of a part go on into the next",
        MATRIX,
        "sums.clear();\n    const int chunks",
        "if (part == block.first_part || Config::kNarrow) sums.clear();\n    const int chunks",
    ),
    Mutant(
        "linear-16",
        "the second half of a fragment's rows of x",
        MATRIX,
        "(n + lane / 16) * 8 + lane % 8",
        "n * 8 + lane % 8",
    ),
    Mutant(
        "linear-17",
        "k of a fragment's halves exchanged for x alone",
        MATRIX,
        "step * 2 + lane / 8 % 2));\n        b[0] = pair[0], b[1] = pair[1];",
        "step * 2 + 1 - lane / 8 % 2));\n        b[0] = pair[0], b[1] = pair[1];",
    ),
    Mutant(
        "linear-18",
        "the bias of the tile's first columns for all",
        SUMS,
        "static_cast<const T*>(bias) + column;",
        "static_cast<const T*>(bias) + column % 8;",
    ),
    Mutant(
        "linear-19",
        "the bias is added to every unit's partial sums",
        LAUNCH,
        "if (launch.partial != nullptr) {",
        "if (launch.partial != nullptr && (sums[0] += call.bias == nullptr ? 0.0f : 1.0f, true)) {",
    ),
    Mutant(
        "linear-20",
        "eight columns stored at the matrix's edge",
        LAUNCH,
        "launch.aligned_out && column + kLaneElements <= call.columns",
        "launch.aligned_out",
    ),
    Mutant(
        "linear-21",
        "a warp's rows counted by its columns",
        MATRIX,
        "warp / (Config::kColumnTile / 32) * Config::kWarpRows;",
        "warp % (Config::kColumnTile / 32) * Config::kWarpRows;",
    ),
    Mutant(
        "linear-22",
        "no swizzle: eight lines' pieces in the same banks",
        CONFIG,
        "((piece ^ (line & 7)) << 4)",
        "(piece << 4)",
        unseen="values are right; the time is not",
    ),
    Mutant(
        "linear-23",
        "parts cut by the rows of the call",
        HOST,
        "linear_cut(p.depth).part_depth",
        "linear_cut(p.depth).part_depth * (p.rows > 8 ? 2 : 1)",
    ),
    Mutant(
        "linear-24",
        "partial sums of parts are folded as if they were groups'",
        HOST,
        "kLinearGroupParts / plan.parts_per_unit);",
        "1);",
        tests="emu and (alone or cut_does)",
    ),
    Mutant(
        "linear-25",
        "narrow blocks walk all groups however few they are",
        PLAN,
        "const bool enough = cut.groups == 1 || blocks >= kLinearEnoughBlocks;",
        "const bool enough = true;",
        tests="emu and not scratch",
        harmless="scheduling alone: no bit may depend on it (the scratch asked for does)",
    ),
    Mutant(
        "linear-26",
        "scratch for one row more than fits",
        HOST,
        "plan.tile.row_tile, p.rows, p.exec.workspace_bytes);",
        "plan.tile.row_tile, p.rows, p.exec.workspace_bytes + plan.row_bytes);",
    ),
    Mutant(
        "linear-27",
        "a later launch begins at the first row",
        HOST,
        "launch.call.x = static_cast<const char*>(p.x) + first * p.x_row_stride * x_bytes;",
        "launch.call.x = p.x;",
    ),
    Mutant(
        "linear-28",
        "the weight's alignment not looked at",
        HOST,
        "&&\n         aligned_for_lanes(p.weight, p.dtype, p.weight_row_stride)",
        "",
    ),
    Mutant(
        "linear-29",
        "depths that are no multiple of 8 by 16-byte copies",
        HOST,
        "p.depth % kLaneElements == 0 &&",
        "",
    ),
    Mutant(
        "linear-30",
        "no barrier before the plain kernel's next stage",
        PLAIN,
        "total[r] += chain[r];\n    __syncthreads();",
        "total[r] += chain[r];",
    ),
    Mutant(
        "linear-31",
        "the plain kernel reads past a row's end",
        PLAIN,
        "first + line < end && k + at < p.depth",
        "first + line < end",
    ),
    Mutant(
        "linear-32",
        "the plain kernel's chains run on",
        PLAIN,
        "total[r] += chain[r];",
        "total[r] = chain[r];",
    ),
    Mutant(
        "linear-33",
        "cuts that follow from nothing but chunks: a part too short",
        CUT,
        "(depth - 1) / (cut.groups * kLinearGroupParts) + 1",
        "(depth - 1) / (cut.groups * kLinearGroupParts)",
    ),
    Mutant(
        "linear-34",
        "x copied before the kernel that writes it has ended",
        MATRIX,
        "weights.template copy<true, false>(s);",
        "weights.template copy<true, true>(s);",
    ),
]
