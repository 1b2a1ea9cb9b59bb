"""Mutants of sink tokens in attention."""

from __future__ import annotations

from mutants.model import Mutant

PLAN_PARTS = "cuda/attention/plan.cuh"
KEYS = "cuda/attention/unit_keys.cuh"
ROWS = "cuda/attention/rows.cuh"
TAIL = "cuda/attention/tail.cuh"
COPY = "cuda/attention/ampere_copy.cuh"
MAIN = "cuda/attention/ampere.cuh"
LOAD = "cuda/attention/hopper_load.cuh"
CONSUMER = "cuda/attention/hopper_consumer.cuh"
GENERIC = "cuda/attention/generic.cuh"

MUTANTS = [
    Mutant(
        "sinkplan-1",
        "sink tokens of a text without main keys in its window left out",
        PLAN_PARTS,
        "} else if (sink_end > 0) { job.end_key = sink_end; } else {",
        "} else {",
    ),
    Mutant(
        "sinkplan-2",
        "the sink tokens' unit is left out where the window's is in the same block",
        PLAN_PARTS,
        "emit(block, first, gap.begin, begins ? UnitStates::kHandsOn : states);",
        "",
        tests="number_of_blocks and ampere_f16_f16_k64_r16",
    ),
    Mutant(
        "sinkplan-3",
        "sink tokens' pages of the tail not checked",
        PLAN_PARTS,
        "check(first.main_end, min(std::int64_t{call.sink_tokens}, keys));",
        "",
        tests="bad_page and ampere_f16_f16_k64_r16",
    ),
    Mutant(
        "sinkplan-4",
        "the sink tokens are counted past the main keys",
        PLAN_PARTS,
        "begin > 0 ? min(call.sink_tokens, end) : 0;",
        "begin > 0 ? call.sink_tokens : 0;",
        harmless="rows' masks hide them: blocks too many, and keys that are there",
    ),
    Mutant(
        "sinkampere-1",
        "keys between sink tokens and window taken in their chunk",
        KEYS,
        "sink_end = job.hole_begin; begin = job.hole_end;",
        "",
    ),
    Mutant(
        "sinkampere-2",
        "one key behind the sink tokens taken",
        COPY,
        "row < sink_rows;",
        "row <= sink_rows;",
    ),
    Mutant(
        "sinkampere-3",
        "a unit that hands its sum on leaves it, too",
        MAIN,
        "(last && states == UnitStates::kOne);",
        "last;",
        tests="number_of_blocks and ampere_f16_f16_k64_r16",
    ),
    Mutant(
        "sinkampere-4",
        "sink tokens in a tree's rows hidden",
        ROWS,
        "sinks > 0 ? nth_ancestor(slots.drafts, sinks) : 0;",
        "0;",
    ),
    Mutant(
        "sinkampere-5",
        "a row sees sink tokens in its tail twice",
        ROWS,
        "bit_range(0, min(sink_tokens, slots.end) - first_slot);",
        "bit_range(0, sink_tokens - first_slot);",
    ),
    Mutant(
        "sinkhopper-1",
        "pages of sink tokens not looked up in the window's chunk",
        KEYS,
        "|| (key < sink_end && key + count > first);",
        ";",
    ),
    Mutant(
        "sinkhopper-2",
        "the sink tokens' sum is not handed on",
        CONSUMER,
        "if (ends.states == UnitStates::kHandsOn) continue;",
        "",
    ),
    Mutant(
        "sinkhopper-3",
        "pages looked up from the window's first on",
        LOAD,
        "window_((keys.first >> launch.page_shift) / 32),",
        "window_((keys.begin >> launch.page_shift) / 32),",
        tests="(block or kind_of_kernel or values) and hopper_f16_f16_k64_r64",
        harmless="first and begin of one chunk of 256 keys lie in the same 32 pages of 16 tokens",
    ),
    Mutant(
        "sinkfinish-1",
        "sink tokens of the tail left out",
        TAIL,
        "const std::int32_t num_sinks = max(sink_end - keys.main_end, 0);",
        "const std::int32_t num_sinks = 0;",
    ),
    Mutant(
        "sinkfinish-2",
        "sink tokens among a tree's rows not found",
        TAIL,
        "} else if (mine < sink_end) { put(mine - keys.main_end, slot); }",
        "}",
    ),
    Mutant(
        "sinkgeneric-1",
        "groups between in one chunk are not skipped",
        GENERIC,
        "if (base >= row.sink_end && base + kGroupKeys <= row.begin) continue;",
        "",
        harmless="behind a group with sink tokens one without a key changes nothing",
    ),
    Mutant(
        "sinkgeneric-2",
        "the window's first chunk skipped",
        GENERIC,
        "max(row.begin / kChunkKeys - sink_chunks, 0);",
        "row.begin / kChunkKeys;",
    ),
    Mutant(
        "sinkgeneric-3",
        "sink tokens without their values",
        GENERIC,
        "for (int part = base < row.sink_end ? 0 : 1; part < 2; ++part) {",
        "for (int part = 1; part < 2; ++part) {",
    ),
]
