"""Mutants of the Hopper family's main pass with e4m3 operands: transposition, rounding, sums."""

from __future__ import annotations

from mutants.model import Mutant

MAIN = "cuda/attention/hopper.cuh"
CONSUMER = "cuda/attention/hopper_consumer.cuh"
PRODUCTS = "cuda/attention/hopper_fp8.cuh"
TURN = "cuda/attention/hopper_transpose.cuh"

MUTANTS = [
    Mutant(
        "fp8-1",
        "no wait for the transposed V",
        CONSUMER,
        "gpu::wgmma_commit(); gpu::mbarrier_wait(&shared.v_ready.full[v_at.stage], v_at.round);",
        "gpu::wgmma_commit();",
    ),
    Mutant(
        "fp8-2",
        "V read for transposition before it is there",
        TURN,
        "gpu::mbarrier_wait(&shared.v_raw.full[from.stage], from.round);",
        "",
    ),
    Mutant(
        "fp8-3",
        "transposed V overwritten before it is used",
        TURN,
        "gpu::mbarrier_wait(&shared.v_ready.empty[to.stage], to.round ^ 1);",
        "",
    ),
    Mutant(
        "fp8-4", "no proxy fence behind the transposition", TURN, "gpu::fence_proxy_async();", ""
    ),
    Mutant(
        "fp8-5",
        "lanes not done when the first hands the tile over",
        TURN,
        "gpu::fence_proxy_async(); __syncwarp();",
        "gpu::fence_proxy_async();",
    ),
    Mutant(
        "fp8-6",
        "keys in memory order, not in that of the weights",
        TURN,
        "const int key = 8 * (i / 2 % 2) + 2 * (i / 4) + i % 2;",
        "const int key = i;",
    ),
    Mutant(
        "fp8-7",
        "keys of other units not zeroed in V",
        TURN,
        "if (partial && !keys.has(first_key + key)) in[i] = 0;",
        "",
    ),
    Mutant(
        "fp8-8",
        "the first key of a group decides about all of them",
        TURN,
        "keys.has(first_key + key)",
        "keys.has(first_key)",
    ),
    Mutant(
        "fp8-9",
        "the swizzle of the transposed tile one bit off",
        TURN,
        "(group ^ (column / 2 % 4))",
        "(group ^ (column % 4))",
    ),
    Mutant(
        "fp8-10",
        "another byte than the column's",
        TURN,
        "const int column = 4 * lane + byte;",
        "const int column = 4 * lane + step;",
    ),
    Mutant(
        "fp8-11",
        "turns begin anew with each tile",
        TURN,
        "for (std::int32_t block = keys.first_block(); block < keys.end_block(); ++block) {",
        "for (std::int32_t block = keys.first_block(); block < keys.end_block(); ++block) {\n"
        "      turn = 0;",
        harmless="every warp counts the same turns: the groups are shared out less evenly",
    ),
    Mutant(
        "fp8-12",
        "a block's values not added to those before",
        PRODUCTS,
        "o_[i] = fmaf(o_[i], decay_[i / 2 % 2], part_[i]);",
        "o_[i] = part_[i];",
    ),
    Mutant(
        "fp8-13",
        "sums not rescaled when the reference moves",
        PRODUCTS,
        "o_[i] = fmaf(o_[i], decay_[i / 2 % 2], part_[i]);",
        "o_[i] = o_[i] + part_[i];",
    ),
    Mutant(
        "fp8-14",
        "rescaled by the decay of the block behind",
        CONSUMER,
        "products.collect(); if (new_chunk) {",
        "products.rescale(decay, moved);\n      products.collect();\n      if (new_chunk) {",
    ),
    Mutant(
        "fp8-15",
        "scores not multiplied by the inverse of the queries' power of two",
        CONSUMER,
        "scale.factor * (scale.mapped ? 1.0f : products.unit(1))",
        "scale.factor * (scale.mapped ? 1.0f : products.unit(0))",
    ),
    Mutant(
        "fp8-16",
        "with a soft cap: not multiplied by it",
        CONSUMER,
        "s[i] = scale.map(s[i] * products.unit(i / 2 % 2));",
        "s[i] = scale.map(s[i] * products.unit(0));",
    ),
    Mutant(
        "fp8-17",
        "the largest query of a quarter of the row",
        PRODUCTS,
        "power_for(gpu::quad_max(largest), unit_[half])",
        "power_for(largest, unit_[half])",
    ),
    Mutant(
        "fp8-18",
        "queries brought to [256, 512): the largest saturate",
        PRODUCTS,
        "inverse = __uint_as_float((exponent - 7) << 23); return exponent == 255 ? "
        "__uint_as_float(0x7fc00000u) : __uint_as_float((261 - exponent) << 23);",
        "inverse = __uint_as_float((exponent - 8) << 23);\n    return exponent == 255 ? "
        "__uint_as_float(0x7fc00000u)\n                           : "
        "__uint_as_float((262 - exponent) << 23);",
    ),
    Mutant(
        "fp8-19",
        "an infinity in q becomes 448",
        PRODUCTS,
        "return exponent == 255 ? __uint_as_float(0x7fc00000u) : ",
        "return ",
    ),
    Mutant(
        "fp8-20",
        "weights at most 1: small ones are lost",
        PRODUCTS,
        "static constexpr float kHeadroom = 8.0f;",
        "static constexpr float kHeadroom = 0.0f;",
    ),
    Mutant(
        "fp8-21",
        "weights up to 2^10: the greatest saturate",
        PRODUCTS,
        "static constexpr float kHeadroom = 8.0f;",
        "static constexpr float kHeadroom = 10.0f;",
    ),
    Mutant(
        "fp8-22",
        "weights of the two halves of 32 keys change places",
        PRODUCTS,
        "p_[i / 2][row + i % 2 * 2]",
        "p_[i / 2][row + (1 - i % 2) * 2]",
    ),
    Mutant(
        "fp8-23",
        "the second instruction of V P reads the first's keys",
        PRODUCTS,
        "gpu::wgmma_behind(values, step * 32)",
        "gpu::wgmma_behind(values, 0)",
    ),
    Mutant(
        "fp8-24",
        "transposed V released before its product is done",
        CONSUMER,
        "gpu::wgmma_wait<0>(); products.hold(); release(&shared.v_ready.empty[v_at.stage]); "
        "v_at.advance(); products.collect(); if (new_chunk)",
        "release(&shared.v_ready.empty[v_at.stage]);\n      gpu::wgmma_wait<0>();\n"
        "      products.hold();\n      v_at.advance();\n      products.collect();\n"
        "      if (new_chunk)",
    ),
    Mutant(
        "fp8-25",
        "fragments of Q: the two 16-column halves change places",
        PRODUCTS,
        "fragments_[i / 2][half + i % 2 * 2]",
        "fragments_[i / 2][half + (1 - i % 2) * 2]",
    ),
    Mutant(
        "fp8-26",
        "only two warps have to hand a transposed tile over",
        MAIN,
        "init_ring(shared.v_ready, Shared::kRawValues ? kTurningWarps<Tile> : 1, kConsumerWarps);",
        "init_ring(shared.v_ready, kTurningWarps<Tile> - 1, kConsumerWarps);",
    ),
    Mutant(
        "fp8-27",
        "states of chunks after a cut are folded into one",
        CONSUMER,
        "if (!folds) leave_state();",
        "",
    ),
    Mutant(
        "fp8-28",
        "the folded state of a unit goes on in the next",
        CONSUMER,
        "clear(); ++slot;",
        "++slot;",
    ),
]
