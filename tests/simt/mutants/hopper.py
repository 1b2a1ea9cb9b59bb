"""Mutants of the Hopper family's main pass: copies, barriers, proxies, wgmma, states."""

from __future__ import annotations

from mutants.model import Mutant

MAIN = "cuda/attention/hopper.cuh"
LOAD = "cuda/attention/hopper_load.cuh"
KEYS = "cuda/attention/unit_keys.cuh"
CONSUMER = "cuda/attention/hopper_consumer.cuh"
PRODUCTS = "cuda/attention/hopper_products.cuh"
ROWS = "cuda/attention/hopper_rows.cuh"
WIDEN = "cuda/attention/hopper_widen.cuh"
TILE = "cuda/attention/hopper_tile.h"

MUTANTS = [
    Mutant(
        "hopper-1",
        "first block: no wait for K",
        CONSUMER,
        "std::int32_t block = keys.first_block(); "
        "gpu::mbarrier_wait(&shared.k_ready.full[k_at.stage], k_at.round);",
        "std::int32_t block = keys.first_block();",
    ),
    Mutant(
        "hopper-2",
        "no wait for K",
        CONSUMER,
        "while (++block < end_block) { "
        "gpu::mbarrier_wait(&shared.k_ready.full[k_at.stage], k_at.round);",
        "while (++block < end_block) {",
    ),
    Mutant(
        "hopper-3",
        "no wait for V",
        CONSUMER,
        "gpu::wgmma_commit(); gpu::mbarrier_wait(&shared.v_ready.full[v_at.stage], v_at.round);",
        "gpu::wgmma_commit();",
    ),
    Mutant(
        "hopper-4",
        "last block: no wait for V",
        CONSUMER,
        "products.pack_weights(s); } "
        "gpu::mbarrier_wait(&shared.v_ready.full[v_at.stage], v_at.round);",
        "products.pack_weights(s);\n    }",
    ),
    Mutant(
        "hopper-5",
        "K's stage filled again before it is free",
        LOAD,
        "gpu::mbarrier_wait(empty, at.round ^ 1);",
        "",
    ),
    Mutant(
        "hopper-6",
        "K's stage released before its product is done",
        CONSUMER,
        "gpu::wgmma_wait<1>(); gpu::wgmma_hold(s); release(&shared.k_ready.empty[k_at.stage]);",
        "release(&shared.k_ready.empty[k_at.stage]);\n      gpu::wgmma_wait<1>();\n"
        "      gpu::wgmma_hold(s);",
        harmless="K of block j + n (n stages) is filled after V of j + n - 1, whose stage is "
        "released in iteration j after wgmma_wait<0>: K's product is done by then",
    ),
    Mutant(
        "hopper-7",
        "V's stage released before its product is done",
        CONSUMER,
        "gpu::wgmma_wait<0>(); products.hold(); release(&shared.v_ready.empty[v_at.stage]); "
        "v_at.advance(); products.collect(); if (new_chunk)",
        "release(&shared.v_ready.empty[v_at.stage]);\n      gpu::wgmma_wait<0>();\n"
        "      products.hold();\n      v_at.advance();\n      products.collect();\n"
        "      if (new_chunk)",
    ),
    Mutant(
        "hopper-8",
        "scores read while their product runs",
        CONSUMER,
        "gpu::wgmma_wait<1>(); gpu::wgmma_hold(s);",
        "gpu::wgmma_wait<2>();\n      gpu::wgmma_hold(s);",
    ),
    Mutant(
        "hopper-9",
        "first block: scores read while their product runs",
        CONSUMER,
        "gpu::wgmma_commit(); gpu::wgmma_wait<0>(); gpu::wgmma_hold(s);",
        "gpu::wgmma_commit();\n    gpu::wgmma_wait<1>();\n    gpu::wgmma_hold(s);",
    ),
    Mutant(
        "hopper-10",
        "sums of values read while their product runs",
        CONSUMER,
        "close_sums(weights); gpu::wgmma_wait<0>(); products.hold();",
        "close_sums(weights);\n    products.hold();",
    ),
    Mutant(
        "hopper-11",
        "no fence before the product reads registers",
        CONSUMER,
        "gpu::wgmma_fence(); products.multiply_values(shared.v[v_at.stage]); "
        "gpu::wgmma_commit(); gpu::wgmma_wait<1>();",
        "products.multiply_values(shared.v[v_at.stage]);\n      gpu::wgmma_commit();\n"
        "      gpu::wgmma_wait<1>();",
    ),
    Mutant(
        "hopper-12",
        "no proxy fence after V is cleaned",
        LOAD,
        "gpu::fence_proxy_async();",
        "",
    ),
    Mutant(
        "hopper-13",
        "V past the range not cleaned",
        LOAD,
        "if (!keys.has(key)) tile[i] = make_uint4(0, 0, 0, 0);",
        "",
    ),
    Mutant(
        "hopper-14",
        "V before the range not cleaned",
        KEYS,
        "return block * kBlockKeys < begin || (block + 1) * kBlockKeys > end;",
        "return (block + 1) * kBlockKeys > end;",
    ),
    Mutant(
        "hopper-15",
        "lanes of the cleaning warp do not wait for each other",
        LOAD,
        "gpu::fence_proxy_async(); __syncwarp();",
        "gpu::fence_proxy_async();",
    ),
    Mutant(
        "hopper-16",
        "the ring's parity is never flipped",
        LOAD,
        "if (++stage == kStages) stage = 0, round ^= 1;",
        "if (++stage == kStages) stage = 0;",
    ),
    Mutant(
        "hopper-17",
        "a stage is free when one warp is done with it",
        MAIN,
        "init_ring(shared.v_ready, Shared::kRawValues ? kTurningWarps<Tile> : 1, kConsumerWarps);",
        "init_ring(shared.v_ready, Shared::kRawValues ? kTurningWarps<Tile> : 1, 1);",
    ),
    Mutant(
        "hopper-18",
        "no barrier between the barriers' making and their use",
        MAIN,
        "gpu::prefetch_tensor_map(v_map); } __syncthreads();",
        "gpu::prefetch_tensor_map(v_map);\n  }",
    ),
    Mutant(
        "hopper-19",
        "a warp's lanes are not done when the first releases the stage",
        CONSUMER,
        "__syncwarp(); if (lane == 0) gpu::mbarrier_arrive(empty);",
        "if (lane == 0) gpu::mbarrier_arrive(empty);",
        harmless="wgmma, not the lanes, reads the stage: each warp's first lane has waited for it",
    ),
    Mutant(
        "hopper-20",
        "K's descriptor half a step on",
        PRODUCTS,
        "gpu::wgmma_behind(keys, step / 4 * Tile::kBoxBytes + step % 4 * 32)",
        "gpu::wgmma_behind(keys, step / 4 * Tile::kBoxBytes + step % 4 * 16)",
    ),
    Mutant(
        "hopper-21",
        "V's descriptor not moved along the keys",
        PRODUCTS,
        "gpu::wgmma_behind(values, step * 2048)",
        "gpu::wgmma_behind(values, 0)",
    ),
    Mutant(
        "hopper-22",
        "fragment of P: pairs of rows mixed",
        PRODUCTS,
        "pack<T>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);",
        "pack<T>(s[8 * step + 2 * (i ^ 1)], s[8 * step + 2 * (i ^ 1) + 1]);",
    ),
    Mutant(
        "hopper-23",
        "fragment of Q: eight columns on",
        PRODUCTS,
        "fragments_[(first + i) / 2][half + (first + i) % 2 * 2] = words[i];",
        "fragments_[(first + i) / 2][half + (first + i + 1) % 2 * 2] = words[i];",
    ),
    Mutant(
        "hopper-59",
        "queries: lanes of a row do not exchange their words",
        PRODUCTS,
        "gpu::quad_transpose(words);",
        "",
    ),
    Mutant(
        "hopper-60",
        "queries: the rows of a second half are those of the first",
        PRODUCTS,
        "const std::int32_t row = warp_row + lane / 4 + 8 * half; "
        "const bool exists = rows.exists(row, launch.group); const std::int32_t token",
        "const std::int32_t row = warp_row + lane / 4;\n"
        "      const bool exists = rows.exists(row, launch.group);\n      const std::int32_t token",
    ),
    Mutant(
        "hopper-61",
        "states: a thread keeps the two numbers that it gives",
        CONSUMER,
        "const float2 kept = odd ? own[1] : own[0],",
        "const float2 kept = odd ? own[0] : own[1],",
    ),
    Mutant(
        "hopper-62",
        "states: the neighbour's numbers of another 8 go to the same place",
        CONSUMER,
        "(odd ? 8 : 0) + lane / 2 % 2 * 4;",
        "lane / 2 % 2 * 4;",
    ),
    Mutant(
        "hopper-24",
        "page id not held against the pool, request not flagged",
        LOAD,
        "if (id >= 0 && id < num_pages_) return id;",
        "return id;",
    ),
    Mutant(
        "hopper-25",
        "page ids of the window before",
        LOAD,
        "ids_ = next_ids_; next_ids_ = lookup(window_ + 1);",
        "next_ids_ = lookup(window_ + 1);",
        tests="past_every_window and hopper_f16_f16_k64_r128",
    ),
    Mutant(
        "hopper-26",
        "the window after the next one is not looked up",
        LOAD,
        "ids_ = next_ids_; next_ids_ = lookup(window_ + 1);",
        "ids_ = next_ids_;",
        tests="past_every_window and hopper_f16_f16_k64_r128",
    ),
    Mutant(
        "hopper-27",
        "last page of a range not read",
        KEYS,
        "return (key + count > begin && key < end)",
        "return (key + count > begin && key + count < end)",
    ),
    Mutant(
        "hopper-28",
        "second half of a long page read from its begin",
        LOAD,
        "const std::int32_t in_page = key & (page_size - 1);",
        "const std::int32_t in_page = 0;",
    ),
    Mutant(
        "hopper-29",
        "a unit's keys past the chunk belong to it",
        KEYS,
        "end(min(job.end_key, chunk_begin(end_chunk))),",
        "end(job.end_key),",
    ),
    Mutant(
        "hopper-30",
        "a chunk's sums of values live on",
        CONSUMER,
        "folded[i] = merge(weights[i / 2 % 2], folded[i], products.sum(i)); "
        "products.sum(i) = 0.0f;",
        "folded[i] = merge(weights[i / 2 % 2], folded[i], products.sum(i));",
    ),
    Mutant(
        "hopper-31",
        "a unit's chunks are one: where they end depends on how the work was cut",
        CONSUMER,
        "const bool new_chunk = block * kBlockKeys == chunk_end;",
        "const bool new_chunk = false;",
    ),
    Mutant(
        "hopper-32",
        "chunks ended one block late",
        CONSUMER,
        "const bool new_chunk = block * kBlockKeys == chunk_end;",
        "const bool new_chunk = block * kBlockKeys == chunk_end + kBlockKeys;",
    ),
    Mutant(
        "hopper-33",
        "sums of values not rescaled",
        PRODUCTS,
        "o_[i] *= decay[i / 2 % 2];",
        "o_[i] *= decay[0];",
    ),
    Mutant(
        "hopper-34",
        "rows of the second warpgroup take the queries of the first",
        CONSUMER,
        "job.row_block * Tile::kRowTile + consumer * 64};",
        "job.row_block * Tile::kRowTile};",
    ),
    Mutant(
        "hopper-35",
        "a state's row without the warpgroup's place",
        CONSUMER,
        "static_cast<std::int64_t>(slot) * Tile::kRowTile + consumer * 64 + at;",
        "static_cast<std::int64_t>(slot) * Tile::kRowTile + at;",
    ),
    Mutant(
        "hopper-36",
        "a row's reference moves only when all of the warp's do",
        ROWS,
        "return __any_sync(kAllLanes, moved) != 0;",
        "return __all_sync(kAllLanes, moved) != 0;",
    ),
    Mutant(
        "hopper-37",
        "the running maximum is not seen by all four threads of a row",
        ROWS,
        "top = gpu::quad_max(top) * factor[row] - headroom;",
        "top = top * factor[row] - headroom;",
    ),
    Mutant(
        "hopper-38",
        "no __syncwarp between the rows' views and their readers",
        ROWS,
        "views[lane] = view; } __syncwarp();",
        "views[lane] = view;\n  }",
        harmless="between the views and their first reader, the first block's softmax, K's stage "
        "is released, which has a __syncwarp",
    ),
    Mutant(
        "hopper-39",
        "views written while the warp still reads the unit's before",
        ROWS,
        "__syncwarp(); if (lane < 16) {",
        "if (lane < 16) {",
        harmless="behind the last reader, the softmax of the unit's last block, V's stage is "
        "released, which has a __syncwarp",
    ),
    Mutant(
        "hopper-40",
        "second column of a pair not masked",
        ROWS,
        "if (!(visible >> (8 * n + 1) & 1)) s[4 * n + 2 * row + 1] = empty_max();",
        "",
    ),
    Mutant(
        "hopper-41",
        "the plan read before the kernel that writes it has ended",
        MAIN,
        "__syncthreads(); gpu::grid_dependency_wait_if(!launch.plan_is_old);",
        "__syncthreads();",
    ),
    Mutant(
        "hopper-42",
        "waits for the kernel before it behind the units it has read",
        MAIN,
        "__syncthreads(); gpu::grid_dependency_wait_if(!launch.plan_is_old); const int warpgroup",
        "__syncthreads(); if (launch.work.block_begin[blockIdx.x] < 0) return; "
        "gpu::grid_dependency_wait_if(!launch.plan_is_old); const int warpgroup",
    ),
    Mutant(
        "hopper-43",
        "warpgroups ask for all registers of a multiprocessor",
        TILE,
        "return kEach;",
        "return kEach + kStep;",
    ),
    Mutant(
        "hopper-44",
        "the producer gives nothing back",
        MAIN,
        "if constexpr (Tile::kHandsOver) gpu::setmaxnreg_dec<Tile::kProducerRegisters>();",
        "if constexpr (Tile::kHandsOver) gpu::setmaxnreg_dec<168>();",
    ),
    Mutant(
        "queries-1",
        "no proxy fence after the queries are written",
        PRODUCTS,
        "gpu::fence_proxy_async(); gpu::named_barrier_sync(barrier_, 128);",
        "gpu::named_barrier_sync(barrier_, 128);",
    ),
    Mutant(
        "queries-2",
        "no barrier after the queries are written",
        PRODUCTS,
        "gpu::fence_proxy_async(); gpu::named_barrier_sync(barrier_, 128);",
        "gpu::fence_proxy_async();",
    ),
    Mutant(
        "queries-3",
        "no barrier before the queries are overwritten",
        PRODUCTS,
        "gpu::named_barrier_sync(barrier_, 128);  // all warps are done with the queries before",
        "",
        unseen="the emulator takes a wgmma's operands as read when one warp of its group has "
        "waited for it; PTX promises that for the warp's own part only, so the barrier stays",
    ),
    Mutant(
        "queries-4",
        "queries not swizzled",
        PRODUCTS,
        "((vector ^ row) & 7)] = q;",
        "(vector & 7)] = q;",
    ),
    Mutant(
        "wide-1",
        "no proxy fence after a tile is widened",
        WIDEN,
        "gpu::fence_proxy_async();",
        "",
    ),
    Mutant(
        "wide-2",
        "no wait for the raw tile",
        WIDEN,
        "gpu::mbarrier_wait(raw_full, from.round);",
        "",
    ),
    Mutant(
        "wide-3",
        "no wait for the tile to be free",
        WIDEN,
        "gpu::mbarrier_wait(empty, to.round ^ 1);",
        "",
    ),
    Mutant(
        "wide-4",
        "raw tile released before all lanes have read it",
        WIDEN,
        "gpu::fence_proxy_async(); __syncwarp();",
        "gpu::fence_proxy_async();",
    ),
    Mutant(
        "wide-5",
        "keys outside of the range not zeroed",
        WIDEN,
        "if (i < kVectors && (!partial || keys.has(key)))",
        "if (i < kVectors)",
    ),
    Mutant(
        "wide-6",
        "second half of sixteen numbers to the wrong chunk",
        WIDEN,
        "line[(chunk + 1) ^ (row & 7)]",
        "line[(chunk ^ (row & 7)) + 1]",
    ),
    Mutant(
        "wide-7",
        "numbers 2 and 3 of four are 1 and 2",
        WIDEN,
        "convert_e4m3<T>(words[w] >> 16);",
        "convert_e4m3<T>(words[w] >> 8 & 0xffffu);",
    ),
    Mutant(
        "wide-8",
        "the second loading warpgroup has no tile to widen",
        MAIN,
        "    turn_tiles<T>(launch, shared);\n  } else {",
        "  } else {",
    ),
]
