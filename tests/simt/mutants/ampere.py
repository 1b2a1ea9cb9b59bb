"""Mutants of the Ampere family's main pass, with what the Hopper family shares, and of the generic
kernel."""

from __future__ import annotations

from mutants.model import Mutant

MAIN = "cuda/attention/ampere.cuh"
COPY = "cuda/attention/ampere_copy.cuh"
SOFTMAX = "cuda/attention/softmax.cuh"
ROWS = "cuda/attention/rows.cuh"
ELEMENTS = "cuda/attention/elements.cuh"

MUTANTS = [
    Mutant(
        "ampere-1",
        "no wait for K",
        MAIN,
        "gpu::cp_async_wait<2 * Config::kStages - 2>(); const unsigned char* k",
        "const unsigned char* k",
    ),
    Mutant(
        "ampere-2",
        "no wait for V",
        MAIN,
        "gpu::cp_async_wait<2 * Config::kStages - 2>(); if constexpr (Config::kOneOperand)",
        "if constexpr (Config::kOneOperand)",
    ),
    Mutant(
        "ampere-3",
        "wait for K leaves one group too many",
        MAIN,
        "gpu::cp_async_wait<2 * Config::kStages - 2>(); const unsigned char* k",
        "gpu::cp_async_wait<2 * Config::kStages - 1>(); const unsigned char* k",
    ),
    Mutant(
        "ampere-4",
        "no barrier after K's wait",
        MAIN,
        "sync_block<Config>();  // K is there, and everybody is done with the values before",
        "",
    ),
    Mutant(
        "ampere-5",
        "no barrier after V's wait",
        MAIN,
        "sync_block<Config>();  // V is there, and everybody is done with the keys",
        "",
    ),
    Mutant(
        "ampere-6",
        "no barrier before the next unit's queries",
        MAIN,
        "sync_block<Config>();  // before the next unit's queries and groups take their places",
        "",
        harmless="the next unit's page look-up has a barrier before anything is overwritten "
        "that a slower warp still reads",
    ),
    Mutant(
        "ampere-7",
        "K's next copy starts before everybody is done with K",
        MAIN,
        "sync_block<Config>();  // V is there, and everybody is done with the keys"
        " copier.start_keys(block + Config::kStages, end_block, false);",
        "copier.start_keys(block + Config::kStages, end_block, false);\n"
        "      sync_block<Config>();",
    ),
    Mutant(
        "ampere-8",
        "fragment of P: second and third register swapped",
        MAIN,
        "pack<T>(p[2 * step][2], p[2 * step][3]), pack<T>(p[2 * step + 1][0], p[2 * step + 1][1]),",
        "pack<T>(p[2 * step + 1][0], p[2 * step + 1][1]), pack<T>(p[2 * step][2], p[2 * step][3]),",
    ),
    Mutant(
        "ampere-9",
        "fragment of K: halves of the head dim mixed",
        MAIN,
        "(s[n], a, b[0], b[1]); gpu::mma_m16n8k16<typename Config::T>(s[n + 1], a, b[2], b[3]);",
        "(s[n], a, b[0], b[2]); gpu::mma_m16n8k16<typename Config::T>(s[n + 1], a, b[1], b[3]);",
    ),
    Mutant(
        "ampere-10",
        "V not transposed",
        MAIN,
        "gpu::ldmatrix_x4_trans(b, values.at(step * 16, n));",
        "gpu::ldmatrix_x4(b, values.at(step * 16, n));",
    ),
    Mutant(
        "ampere-11",
        "second column of a pair not masked",
        MAIN,
        "if ((visible >> (n * 8 + 1) & 1) == 0) s[n][2 * i + 1] = empty_max();",
        "",
    ),
    Mutant(
        "ampere-12",
        "rows 8..15 of a warp take the mask of rows 0..7",
        MAIN,
        "const std::int32_t r = rows.begin + thread_row(i); if (r >= rows.end) continue; "
        "const std::int32_t token",
        "const std::int32_t r = rows.begin + thread_row(0);\n"
        "    if (r >= rows.end) continue;\n    const std::int32_t token",
    ),
    Mutant(
        "ampere-13",
        "a row's end does not count for the blocks that need no mask",
        MAIN,
        "end = min(end, slots.end); }",
        "}",
    ),
    Mutant(
        "ampere-14",
        "blocks before the window's begin are not masked",
        MAIN,
        "return first_slot >= begin && first_slot + kBlockKeys <= end;",
        "return first_slot + kBlockKeys <= end;",
    ),
    Mutant(
        "ampere-15",
        "a unit's chunks are one: where they end depends on how the work was cut",
        MAIN,
        "if (last || (block + 1) * Config::kKeys == chunk_begin(chunk_index + 1)) {",
        "if (last) {",
    ),
    Mutant(
        "ampere-16",
        "a chunk begins with the state of the one before",
        MAIN,
        "++slot; } chunk.clear();",
        "++slot;\n    }",
    ),
    Mutant(
        "ampere-17",
        "last row not written",
        MAIN,
        "real[i] = rows.begin + thread_row(i) < rows.end;",
        "real[i] = rows.begin + thread_row(i) < rows.end - 1;",
    ),
    Mutant(
        "ampere-18",
        "rows past the request's last written too",
        MAIN,
        "real[i] = rows.begin + thread_row(i) < rows.end;",
        "real[i] = true;",
        harmless="a state has room for a whole row tile, and nobody reads such rows",
    ),
    Mutant(
        "ampere-19",
        "chunks folded by another rounding than in the finish kernel",
        MAIN,
        "o[n][e] = merge(w[e / 2], o[n][e], chunk.o[n][e]);",
        "o[n][e] = o[n][e] * w[e / 2].total + chunk.o[n][e] * w[e / 2].part;",
    ),
    Mutant(
        "ampere-20",
        "V past the range not zeroed",
        COPY,
        "const bool valid = offset >= 0 && inside;",
        "const bool valid = offset >= 0;",
    ),
    Mutant(
        "ampere-21",
        "one key past the range taken",
        COPY,
        "static_cast<std::uint32_t>(row - begin_row) < num_rows",
        "static_cast<std::uint32_t>(row - begin_row) <= num_rows",
    ),
    Mutant(
        "ampere-22",
        "places of the pages not looked up again: stale after 2048 keys",
        COPY,
        "if (first || block % Config::kWindowBlocks == 0) {",
        "if (first) {",
        tests="past_every_window and ampere",
    ),
    Mutant(
        "ampere-23",
        "no barrier between the look-up and the copies",
        COPY,
        "groups[i] = offset; } sync_block<Config>();",
        "groups[i] = offset;\n    }",
    ),
    Mutant(
        "ampere-24",
        "page of the next 16 keys",
        COPY,
        "pages[slot >> launch.page_shift];",
        "pages[(slot + Config::kGroupKeys) >> launch.page_shift];",
    ),
    Mutant(
        "ampere-25",
        "page id not held against the pool",
        COPY,
        "if (page >= 0 && page < cache.num_pages) {",
        "if (page >= 0) {",
    ),
    Mutant(
        "ampere-26",
        "every head of a group reads the first one's query",
        COPY,
        "rows.kv_head * launch.group + r - token * launch.group;",
        "rows.kv_head * launch.group;",
    ),
    Mutant(
        "ampere-27",
        "a masked row divides nothing by nothing",
        SOFTMAX,
        "return m == empty_max() ? 0.0f : m;",
        "return m;",
    ),
    Mutant(
        "ampere-28",
        "sums not rescaled when the maximum grows",
        MAIN,
        "chunk.o[n][e] *= decay[e / 2];",
        "chunk.o[n][e] *= decay[0];",
    ),
    Mutant(
        "ampere-29",
        "maximum over half the row's threads",
        SOFTMAX,
        "top = gpu::quad_max(top);",
        "top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));",
    ),
    Mutant(
        "ampere-30",
        "sum over half the row's threads",
        MAIN,
        "gpu::quad_sum(chunk.l[i])",
        "chunk.l[i] + __shfl_xor_sync(kAllLanes, chunk.l[i], 1)",
    ),
    Mutant(
        "ampere-31",
        "a row's position is its slot",
        ROWS,
        "request.tree ? tree_position(call.step, request, row) : request.kv_len + token;",
        "request.kv_len + token;",
    ),
    Mutant(
        "ampere-32",
        "a bit of the mask before the block is shifted the wrong way",
        ROWS,
        "visible |= slots.drafts[half] >> -at;",
        "visible |= slots.drafts[half];",
    ),
    Mutant(
        "ampere-33",
        "the window's first ancestor is one too late",
        ROWS,
        "nth_ancestor(slots.drafts, begin - request.kv_len);",
        "nth_ancestor(slots.drafts, begin - request.kv_len + 1);",
    ),
    Mutant(
        "ampere-37",
        "the upper half of a mask not seen",
        ROWS,
        "slots.drafts[half] = mask[2 * half] |",
        "slots.drafts[half] = mask[0] |",
    ),
    Mutant(
        "widen-1",
        "K's NaN not noticed",
        COPY,
        "nan |= e4m3_nan(in.x) | e4m3_nan(in.y) | e4m3_nan(in.z) | e4m3_nan(in.w);",
        "",
    ),
    Mutant(
        "widen-2",
        "K's scale forgotten",
        ROWS,
        "call.scale * call.k_scale[kv_head * call.scale_stride];",
        "call.scale;",
    ),
    Mutant(
        "widen-3",
        "subnormal numbers lost",
        ELEMENTS,
        "bytes13 >> 1 & 0x3f803f80u);",
        "bytes13 >> 1 & 0x3c003c00u);",
    ),
    Mutant(
        "widen-4",
        "no barrier between the widened tile and its readers",
        MAIN,
        "sync_block<Config>();  // V is there, and everybody is done with the keys",
        "",
    ),
    Mutant(
        "generic-1",
        "the first key is not looked at",
        "cuda/attention/generic.cuh",
        "first_visible(row.end - 1, p.sliding_window, p.sink_tokens, p.first_key);",
        "first_visible(row.end - 1, p.sliding_window, p.sink_tokens, 0);",
    ),
]
