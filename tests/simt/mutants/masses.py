"""Mutants of the integers that scores and probabilities are summed to."""

from __future__ import annotations

from mutants.accept import WEIGHTS
from mutants.held import HELD
from mutants.model import Mutant

MUTANTS = [
    Mutant(
        "masses-1",
        "n is rounded to the nearest",
        WEIGHTS,
        "gpu::add_towards_zero(z * 1.44269504f - 0.5f, -0x1p23f)",
        "z * 1.44269504f - 0.5f + -0x1p23f",
    ),
    Mutant(
        "masses-2",
        "the upper part of a mass is rounded to the nearest",
        WEIGHTS,
        "gpu::fma_towards_zero(p, power, 2.0f)",
        "__fmaf_rn(p, power, 2.0f)",
    ),
    Mutant(
        "masses-3",
        "a temperature whose inverse is no number goes the short way",
        WEIGHTS,
        "min_p == 0.0f && inverse <= kLargestFloat",
        "min_p == 0.0f",
    ),
    Mutant(
        "masses-4",
        "probabilities that begin anywhere go the short way",
        HELD,
        "probs.aligned ? min(end, probs.vocab / kChunk) : begin;",
        "min(end, probs.vocab / kChunk);",
    ),
    Mutant(
        "masses-5",
        "the upper part of a probability is rounded to the nearest",
        WEIGHTS,
        "gpu::add_towards_zero(q, 2.0f)",
        "q + 2.0f",
    ),
    Mutant(
        "masses-6",
        "the first of the chunks that a warp reads is added for each",
        HELD,
        "add_prob(q[k][j], sum, faulty)",
        "add_prob(q[0][j], sum, faulty)",
    ),
    Mutant(
        "masses-7",
        "chunks behind those that a warp reads at once are passed over",
        HELD,
        "chunk + (kSummed - 1) * kRowWarps < whole;",
        "chunk < whole;",
    ),
    Mutant(
        "masses-8",
        "of two chunks in turn the second is weighed behind the end too",
        WEIGHTS,
        "weigh_chunk(y, best, inverse, second < whole, mass_of_chunk + second)",
        "weigh_chunk(y, best, inverse, true, mass_of_chunk + second)",
    ),
]
