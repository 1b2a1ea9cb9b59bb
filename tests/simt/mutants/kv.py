"""Mutants of append, fused norm and rotation, and compaction."""

from __future__ import annotations

from mutants.model import Mutant

APPEND = "cuda/kv/append.cu"
STORAGE = "cuda/kv/storage.cuh"
ELEMENTS = "cuda/kv/elements.cuh"
ROPE = "cuda/kv/rope_append.cu"
COMPACT = "cuda/kv/compact.cu"
ROWS = "cuda/step/step_rows.cuh"

MUTANTS = [
    Mutant(
        "append-1",
        "page of the next token",
        ROWS,
        "(slot >> shift)];",
        "((slot + 1) >> shift)];",
    ),
    Mutant(
        "append-2",
        "page id not held against the pool",
        ROWS,
        "page >= 0 && page < num_pages ? page : -1",
        "page >= 0 ? page : -1",
    ),
    Mutant(
        "append-3",
        "negative lengths taken",
        ROWS,
        "kv_len >= 0 &&",
        "true &&",
    ),
    Mutant(
        "append-4",
        "length not held against the page table",
        ROWS,
        "std::int64_t{kv_len} + (end - first) <= capacity",
        "capacity >= 0",
    ),
    Mutant(
        "append-5",
        "a thread behind the last head writes too",
        APPEND,
        "if (item >= p.cache.num_kv_heads * per_head) return;",
        "if (item > p.cache.num_kv_heads * per_head) return;",
    ),
    Mutant(
        "append-6",
        "heads without their stride",
        APPEND,
        "head * p.cache.stride_head + at;",
        "head * p.cache.head_dim + at;",
    ),
    Mutant(
        "append-7",
        "scale of the first head for all",
        STORAGE,
        "scales[head * stride]",
        "scales[0]",
    ),
    Mutant(
        "append-8",
        "multiplied by the scale, not divided",
        STORAGE,
        "x[i] = x[i] / scale;",
        "x[i] = x[i] * scale;",
    ),
    Mutant(
        "append-9",
        "multiplied by the reciprocal: off by one rounding",
        STORAGE,
        "x[i] = x[i] / scale;",
        "x[i] = x[i] * (1.0f / scale);",
    ),
    Mutant(
        "append-10",
        "e4m3 does not saturate",
        ELEMENTS,
        "__NV_SATFINITE",
        "__NV_NOSAT",
    ),
    Mutant(
        "append-11",
        "the row's first request is the one before",
        ROWS,
        "step.cu_rows[b + 1] <= row;",
        "step.cu_rows[b + 1] < row;",
    ),
    Mutant(
        "append-12",
        "unaligned rows read as vectors",
        APPEND,
        "const bool aligned = aligned_for_lanes(p.k, p.dtype, p.k_row_stride) &&",
        "const bool aligned = aligned_for_lanes(p.k, p.dtype) &&",
    ),
    Mutant(
        "append-13",
        "V to the pages of K",
        APPEND,
        "store_scaled(from_v, storage_scale(p.cache, p.v_scale, p.scale_stride, head), p.cache.v,",
        "store_scaled(from_v, storage_scale(p.cache, p.v_scale, p.scale_stride, head), p.cache.k,",
    ),
    Mutant(
        "rope-1",
        "no __syncwarp before the partner is read",
        ROPE,
        "exchange[i * 32 + lane] = x[i];\n      __syncwarp(kAllLanes);",
        "exchange[i * 32 + lane] = x[i];",
    ),
    Mutant(
        "rope-2",
        "no __syncwarp before the next head overwrites",
        ROPE,
        "      __syncwarp(kAllLanes);\n    }\n    if (!active) continue;",
        "    }\n    if (!active) continue;",
    ),
    Mutant(
        "rope-3",
        "partner from the first team's lanes",
        ROPE,
        "lane / kTeam * kTeam +",
        "0 +",
    ),
    Mutant(
        "rope-4",
        "sine not negated for the first of a pair",
        ROPE,
        "e < partner ? -p.sin[row + pair]",
        "e > partner ? -p.sin[row + pair]",
    ),
    Mutant(
        "rope-5",
        "elements past rotary_dim rotated",
        ROPE,
        "if (at + i >= p.rotary_dim) continue;",
        "if (at + i > p.rotary_dim) continue;",
    ),
    Mutant(
        "rope-6",
        "square sum misses half the team",
        ROPE,
        "gpu::warp_sum<kTeam>(sum)",
        "gpu::warp_sum<kTeam / 2>(sum)",
    ),
    Mutant(
        "rope-7",
        "epsilon forgotten",
        ROPE,
        "sqrtf(mean + p.norm_eps)",
        "sqrtf(mean)",
        tests="rope and emu",
    ),
    Mutant(
        "rope-8",
        "position not held against the tables",
        ROPE,
        "position >= 0 && position < p.max_positions",
        "position >= 0 && position <= p.max_positions",
    ),
    Mutant(
        "rope-9",
        "V divided by K's scale",
        ROPE,
        "is_k ? p.k_scale : p.v_scale",
        "p.k_scale",
    ),
    Mutant(
        "rope-10",
        "shared memory of one warp too few",
        ROPE,
        "kRopeThreads * kLaneElements * sizeof(float),",
        "(kRopeThreads - 32) * kLaneElements * sizeof(float),",
    ),
    Mutant(
        "rope-11",
        "heads of a row's second block skipped",
        ROPE,
        "const int warps = static_cast<int>(gridDim.y) * (kRopeThreads / 32);",
        "const int warps = 2 * static_cast<int>(gridDim.y) * (kRopeThreads / 32);",
    ),
    Mutant(
        "compact-1",
        "accepted node one slot early",
        COMPACT,
        "to = rows.kv_len + 1 + i;",
        "to = rows.kv_len + i;",
    ),
    Mutant(
        "compact-2",
        "no barrier between the list and its readers",
        COMPACT,
        "if (__syncthreads_or(flags != 0 ? 1 : 0) != 0 || skip == n) return;",
        "if (flags != 0 || skip == n) return;",
    ),
    Mutant(
        "compact-3",
        "V stays where it is",
        COMPACT,
        "is_v ? p.cache.v : p.cache.k",
        "p.cache.k",
    ),
    Mutant(
        "compact-4",
        "stores before the batch is loaded",
        COMPACT,
        "      if (first + i < count)\n        held[i] =",
        "      if (first + i < count && i == 0) held[i] =\n"
        "          *reinterpret_cast<const Word*>(column + moves.from[first]);\n"
        "      else if (first + i < count)\n        held[i] =",
        harmless="loads the same element by another branch: no change of order",
    ),
    Mutant(
        "compact-5",
        "a batch runs backwards: a later load meets an earlier store",
        COMPACT,
        "for (int first = 0; first < count; first += kBatch) {",
        "for (int first = (count - 1) / kBatch * kBatch; first >= 0; first -= kBatch) {",
    ),
    Mutant(
        "compact-6",
        "last layer skipped",
        COMPACT,
        "if (layer >= p.cache.num_layers) return;",
        "if (layer >= p.cache.num_layers - 1) return;",
    ),
    Mutant(
        "compact-7",
        "blocks past the last layer run on",
        COMPACT,
        "  if (layer >= p.cache.num_layers) return;\n",
        "",
    ),
    Mutant(
        "compact-8",
        "nodes in place are moved onto themselves",
        COMPACT,
        "path[thread] == thread + 1 ? 1 : 0);",
        "path[thread] == thread + 1 ? 0 : 0);",
        harmless="slower, the same bits: a node in place is copied onto itself",
    ),
    Mutant(
        "compact-9",
        "one node of a path forgotten",
        COMPACT,
        "moves, n - skip);",
        "moves, n - skip - 1);",
    ),
]
