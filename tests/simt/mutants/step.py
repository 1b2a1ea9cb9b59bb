"""Mutants of step geometry, mask packing and argmax."""

from __future__ import annotations

from mutants.model import Mutant

BUILD = "cuda/step/build_step.cu"
ARGMAX = "cuda/step/argmax.cu"
BEST = "cuda/step/row_best.cuh"

MUTANTS = [
    Mutant(
        "build-1",
        "no barrier before a round overwrites",
        BUILD,
        "      ancestor = shared.ancestor[ancestor];\n    }\n    __syncthreads();\n",
        "      ancestor = shared.ancestor[ancestor];\n    }\n",
    ),
    Mutant(
        "build-2",
        "ancestor followed, its bits forgotten",
        BUILD,
        "mine.merge(shared.mask[ancestor]);",
        "",
    ),
    Mutant(
        "build-3",
        "padding rows not written",
        BUILD,
        "return clear_rows(p, begin > 0 ? begin : 0, p.step.num_rows);",
        "return;",
    ),
    Mutant(
        "build-4",
        "a node at the depth bound refused",
        BUILD,
        "ancestors.count() - 1 > p.max_depth",
        "ancestors.count() > p.max_depth",
    ),
    Mutant(
        "build-5",
        "a node may be its own parent",
        BUILD,
        "parent < 0 || parent >= i)",
        "parent < 0 || parent > i)",
    ),
    Mutant(
        "build-6",
        "second roots taken",
        BUILD,
        "i == 0 ? parent != -1 : parent < 0 ||",
        "i == 0 ? parent != -1 : parent < -1 ||",
    ),
    Mutant(
        "build-7",
        "words behind the first stay empty",
        BUILD,
        "i / 32 == w ? 1u << (i % 32) : 0u;",
        "w == 0 ? 1u << (i % 32) : 0u;",
    ),
    Mutant(
        "build-8",
        "a chain's full word is shifted by 32",
        BUILD,
        "bits >= 32 ? ~0u :",
        "bits > 32 ? ~0u :",
    ),
    Mutant(
        "build-9",
        "rows past the first block of a long chain not written",
        BUILD,
        "static_cast<unsigned>((most_rows + kBuildThreads - 1) / kBuildThreads)",
        "static_cast<unsigned>(1)",
        harmless="a chain's rows are shared out over the blocks there are, one takes all",
    ),
    Mutant(
        "build-10",
        "page size one bit off",
        BUILD,
        "std::int64_t{page} * p.page_size + (token & (p.page_size - 1))",
        "std::int64_t{page} * p.page_size + (token & p.page_size)",
    ),
    Mutant(
        "build-11",
        "mask columns not bounded",
        BUILD,
        "column < p.cols && p.mask",
        "p.mask",
    ),
    Mutant(
        "build-12",
        "word written by all lanes",
        BUILD,
        "if (lane_id() == 0) p.words[word] = bits;",
        "p.words[word] = bits;",
    ),
    Mutant(
        "argmax-1",
        "no barrier between the warps and their join",
        BEST,
        "shared[threadIdx.x / 32] = best;\n  __syncthreads();",
        "shared[threadIdx.x / 32] = best;",
    ),
    Mutant(
        "argmax-2",
        "the last of equal scores wins",
        BEST,
        "b.index < a.index);",
        "b.index > a.index);",
    ),
    Mutant(
        "argmax-3",
        "elements behind the last vector forgotten",
        BEST,
        "  if (rest < end) offer(best, nan, widen(scores[rest]), rest);\n",
        "",
    ),
    Mutant(
        "argmax-4",
        "elements before the first vector read past the piece",
        BEST,
        "const int aligned = min(end, begin + (kVector - misaligned) % kVector);",
        "const int aligned = begin + (kVector - misaligned) % kVector;",
    ),
    Mutant(
        "argmax-5",
        "NaN of another lane forgotten",
        BEST,
        "if (a.index == kNaNBest || b.index == kNaNBest) return {0.0f, kNaNBest};",
        "if (a.index == kNaNBest) return {0.0f, kNaNBest};",
    ),
    Mutant(
        "argmax-6",
        "a row of minus infinities has no first",
        BEST,
        "best.index == kNoneBest ? 0 : best.index;",
        "best.index;",
    ),
    Mutant(
        "argmax-7",
        "join of the warps misses the last",
        BEST,
        "for (int w = 1; w < kThreads / 32; ++w)",
        "for (int w = 1; w < kThreads / 32 - 1; ++w)",
    ),
    Mutant(
        "argmax-8",
        "pieces past the first 32 forgotten",
        ARGMAX,
        "for (int i = lane_id(); i < num_pieces; i += 32) {",
        "for (int i = lane_id(); i < num_pieces && i < 32; i += 32) {",
    ),
]
