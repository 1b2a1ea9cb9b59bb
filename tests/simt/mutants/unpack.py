"""Mutants of what products of other libraries take: weights unpacked, rows in e4m3."""

from __future__ import annotations

from mutants.model import Mutant

UNPACK = "cuda/linear/unpack.cu"
ROWS = "cuda/linear/e4m3_rows.cu"

MUTANTS = [
    Mutant(
        "unpack-1",
        "a lane's two columns change places with its two k",
        UNPACK,
        "m * 16 + r % 2 * 8 + lane / 4",
        "m * 16 + r / 2 * 8 + lane / 4",
    ),
    Mutant(
        "unpack-2",
        "the k of a lane's second half",
        UNPACK,
        "step * 16 + r / 2 * 8 + lane % 4 * 2",
        "step * 16 + lane % 4 * 2",
    ),
    Mutant(
        "unpack-3",
        "columns of the second fragment over those of the first",
        UNPACK,
        "m * 16 + r % 2 * 8",
        "r % 2 * 8",
    ),
    Mutant(
        "unpack-4",
        "numbers of the second column are the first's",
        UNPACK,
        "static_cast<std::uint16_t>(words[w] >> 16)",
        "static_cast<std::uint16_t>(words[w])",
    ),
    Mutant(
        "unpack-5",
        "numbers of the first 32 k for all",
        UNPACK,
        "(m * 2 + v) * 32 + lane",
        "(m * 2) * 32 + lane",
    ),
    Mutant(
        "unpack-6",
        "k of two words of numbers",
        UNPACK,
        "v * 32 + w * 8 + lane % 4 * 2",
        "v * 32 + w / 2 * 16 + lane % 4 * 2",
    ),
    Mutant(
        "unpack-7",
        "a warp without a tile takes one",
        UNPACK,
        "if (k_tile >= depth_tiles) return;",
        "",
    ),
    Mutant(
        "unpack-8",
        "rows from the weight's first on",
        UNPACK,
        "(p.first / kColumns + columns_of)",
        "columns_of",
    ),
    Mutant(
        "unpack-9",
        "columns past the last are written",
        UNPACK,
        "first_column + column >= p.columns || ",
        "",
    ),
    Mutant(
        "unpack-10",
        "k past the last are written",
        UNPACK,
        " || first_k + k >= p.depth",
        "",
    ),
    Mutant(
        "unpack-11",
        "lanes read what others may not have written",
        UNPACK,
        "  __syncwarp();\n",
        "",
    ),
    Mutant(
        "unpack-12",
        "all warps of a block share their memory",
        UNPACK,
        " + warp * kColumns * kPitch<Out>",
        "",
    ),
    Mutant(
        "unpack-13",
        "half of a tile is written",
        UNPACK,
        "kColumns * kVectors / 32; ++i",
        "kColumns * kVectors / 64; ++i",
    ),
    Mutant(
        "unpack-14",
        "the kernel before may still read what is written",
        UNPACK,
        "  gpu::grid_dependency_wait();\n",
        "",
    ),
    Mutant(
        "unpack-15",
        "blocks of a part of k",
        UNPACK,
        "blockIdx.x % blocks * kWarps + warp",
        "blockIdx.x % blocks + warp",
    ),
    Mutant(
        "unpack-16",
        "numbers of a row in the order of products",
        ROWS,
        "= in_order_of_k(v)",
        "= in_order_of_products(v)",
    ),
    Mutant(
        "unpack-17",
        "a number of four in another's place",
        ROWS,
        "e4m3_code(v[4 * w + 2]) << 16",
        "e4m3_code(v[4 * w + 1]) << 16",
    ),
]
