"""Mutants of weights of 8 and 4 bits."""

from __future__ import annotations

from mutants.model import Mutant

WEIGHTS = "cuda/linear/packed_weights.cuh"
LAYOUT = "cpp/backend/packed_weight.h"
MATRIX = "cuda/linear/linear.cuh"

MUTANTS = [
    Mutant(
        "packed-1",
        "8 bits: another byte",
        WEIGHTS,
        "0x7650u | static_cast<unsigned>(place % 4)",
        "0x7650u | static_cast<unsigned>(place % 4 ^ 1)",
    ),
    Mutant(
        "packed-2",
        "8 bits: both words are the first",
        WEIGHTS,
        "words[place / 4]",
        "words[0]",
    ),
    Mutant("packed-3", "8 bits: zero is 127", WEIGHTS, "(1 << 23) + 128", "(1 << 23) + 127"),
    Mutant(
        "packed-4", "q4_0: zero is 7", WEIGHTS, "(1 << (15 - 4 * i)) + 8", "(1 << (15 - 4 * i)) + 7"
    ),
    Mutant(
        "packed-5",
        "q4_0: the power is taken off twice for one place",
        WEIGHTS,
        "(1 << (15 - 4 * i)) + 8",
        "(1 << (15 - 4 * (i == 2 ? 1 : i))) + 8",
    ),
    Mutant("packed-6", "q4_0: the last three numbers", WEIGHTS, "words[0] >> 12", "words[0] >> 8"),
    Mutant("packed-7", "q4_0: the first two numbers", WEIGHTS, "words[0] << 8", "words[0] << 4"),
    Mutant("packed-8", "q4_1: the last three numbers", WEIGHTS, "words[0] >> 20", "words[0] >> 16"),
    Mutant(
        "packed-9",
        "q4_1: no minimum",
        WEIGHTS,
        "static_cast<float>(1 << (23 - bit)), scale, minimum)",
        "static_cast<float>(1 << (23 - bit)), scale, 0.0f)",
    ),
    Mutant(
        "packed-10",
        "the scale of the other group of k",
        WEIGHTS,
        "(m * 2 + h) * 2 + step / 2",
        "(m * 2 + h) * 2 + 1 - step / 2",
    ),
    Mutant(
        "packed-11",
        "the scale of the column 8 further on",
        WEIGHTS,
        "(m * 2 + h) * 2 + step / 2",
        "(m * 2 + 1 - h) * 2 + step / 2",
    ),
    Mutant(
        "packed-12",
        "scales of another of the lane's columns",
        WEIGHTS,
        "lane / 4 * kLaneElements",
        "lane % 8 * kLaneElements",
    ),
    Mutant(
        "packed-13",
        "the minimums are the scales",
        WEIGHTS,
        "load_floats(factors + kLayout.kScaleBytes / 2, true, minimums)",
        "load_floats(factors, true, minimums)",
    ),
    Mutant(
        "packed-14",
        "a lane's pairs in the wrong halves",
        WEIGHTS,
        "factors.widen(words, 2 * r), factors.widen(words, 2 * r + 1)",
        "factors.widen(words, 2 * r + 1), factors.widen(words, 2 * r)",
    ),
    Mutant(
        "packed-15",
        "8 bits: the second step of a vector is the first",
        WEIGHTS,
        "step % kSteps * kWords",
        "0",
        tests="emu and not fast and q8_0",
    ),
    Mutant(
        "packed-16",
        "tiles past the last column are read",
        WEIGHTS,
        "valid = column < call.columns;",
        "valid = true;",
    ),
    Mutant(
        "packed-17",
        "copies behind the end of a tile",
        WEIGHTS,
        "first + i * kTileThreads >= kTilePieces",
        "false",
    ),
    Mutant(
        "packed-18",
        "the last pieces of a tile are not copied",
        WEIGHTS,
        "(kTilePieces - 1) / kTileThreads + 1",
        "kTilePieces / kTileThreads",
    ),
    Mutant(
        "packed-19",
        "tiles of k counted short where the last is half",
        LAYOUT,
        "return (depth + kDepth - 1) / kDepth;",
        "return depth / kDepth;",
        tests="emu and not fast and values",
    ),
    Mutant(
        "packed-20",
        "all warps of a wide block multiply its first tile",
        WEIGHTS,
        "stage + column / kLayout.kColumns * kLayout.tile_bytes()",
        "stage",
    ),
    Mutant(
        "packed-21",
        "x is rounded to the other 16-bit type",
        WEIGHTS,
        "std::is_same_v<T, __nv_bfloat16>",
        "!std::is_same_v<T, __nv_bfloat16>",
    ),
    Mutant(
        "packed-22",
        "a warp's columns as in the kernel of 16 bits: more threads than have registers",
        WEIGHTS,
        "kWarpRows = 64;",
        "kWarpRows = 32;",
    ),
    Mutant(
        "packed-23",
        "x past the depth is read",
        MATRIX,
        "const bool inside = k < depth;",
        "const bool inside = true;",
    ),
]
