"""Mutants of the plan of attention."""

from __future__ import annotations

from mutants.model import Mutant

PLAN = "cuda/attention/plan.cu"
PLAN_PARTS = "cuda/attention/plan.cuh"

MUTANTS = [
    Mutant(
        "plan-1",
        "no barrier before the warps' sums are written again",
        PLAN_PARTS,
        "__shfl_sync(kAllLanes, sums, warp - 1); __syncthreads();",
        "__shfl_sync(kAllLanes, sums, warp - 1);",
    ),
    Mutant(
        "plan-2",
        "no barrier between the warps' sums and their sum",
        PLAN_PARTS,
        "if (lane == 31) shared->warp_sums[warp] = inclusive; __syncthreads();",
        "if (lane == 31) shared->warp_sums[warp] = inclusive;",
    ),
    Mutant(
        "plan-3",
        "no barrier between the requests' flags and the numbering",
        PLAN,
        "atomicOr(&launch.call.exec.status[b], flags); } } __syncthreads();",
        "atomicOr(&launch.call.exec.status[b], flags); } }",
    ),
    Mutant(
        "plan-4",
        "pages of the tail not checked",
        PLAN_PARTS,
        "bad = bad || pages[i] < 0 || pages[i] >= call.cache.num_pages;",
        "bad = bad || pages[i] < 0;",
    ),
    Mutant(
        "plan-5",
        "keys of the deepest node not counted",
        PLAN_PARTS,
        "last += min(call.max_depth, request.rows - 1);",
        "last += 0;",
    ),
    Mutant(
        "plan-6",
        "a cut job's later chunks share one slot",
        PLAN,
        "slot += unit_slots(first_chunk, end_chunk, states);",
        "slot += 1;",
    ),
    Mutant(
        "plan-7",
        "last block walks nothing",
        PLAN,
        "u == num_units ? work.num_blocks : work.units[u].block;",
        "u == num_units ? work.num_blocks - 1 : work.units[u].block;",
    ),
    Mutant(
        "plan-8",
        "a job that is cut repeats a chunk",
        PLAN_PARTS,
        "emit_chunks(block, unit_begin, chunk); unit_begin = chunk;",
        "emit_chunks(block, unit_begin, chunk + 1); unit_begin = chunk;",
    ),
    Mutant(
        "plan-9",
        "first row of a later row block",
        PLAN_PARTS,
        "first += first_row / launch.group;",
        "first += first_row;",
    ),
    Mutant(
        "plan-10",
        "a request's lengths not held against the page table",
        PLAN_PARTS,
        "keys > std::int64_t{call.step.page_table_stride} << launch.page_shift",
        "false",
    ),
    Mutant(
        "plan-13",
        "jobs begin in front of the first key",
        PLAN_PARTS,
        "const std::int32_t begin = row_keys(launch, first).main_begin;",
        "const std::int32_t begin = exact_row_keys(first, call.max_depth, launch.granule, "
        "call.sliding_window, call.sink_tokens, 0).main_begin;",
        tests="first_key_is_read and ampere_f16_f16_k64_r16",
    ),
    Mutant(
        "plan-14",
        "all jobs' chunks are dealt from the first block on",
        PLAN,
        "const std::int32_t begin = block_scan(own, shared, &total);",
        "const std::int32_t begin = block_scan(own, shared, &total) * 0;",
    ),
]
