"""Mutants of drawing tokens and accepting drafts by probabilities."""

from __future__ import annotations

from mutants.model import Mutant

CUTS = "cpp/algo/law_cuts.h"
ROW = "cuda/accept/block_row.cuh"
CHUNKS = "cuda/accept/row_chunks.cuh"
SHARED = "cuda/accept/law_shared.cuh"
SAMPLE = "cuda/accept/sample_rows.cu"
ACCEPT = "cuda/accept/accept_step.cu"

MUTANTS = [
    Mutant(
        "sample-1",
        "a token is keyed by the position of the row before it",
        SAMPLE,
        "std::int64_t{p.rows.positions[row]} + 1",
        "std::int64_t{p.rows.positions[row]}",
    ),
    Mutant("sample-2", "min_p is ignored", ROW, "min_p_ = law.min_p;", "min_p_ = 0.0f;"),
    Mutant(
        "sample-3",
        "top_p stops a token short of its mass",
        CUTS,
        "ties = (wanted - sums[0] + own - 1) / own;",
        "ties = (wanted - sums[0]) / own;",
    ),
    Mutant(
        "sample-4",
        "rows that begin anywhere are read by 16 bytes",
        CHUNKS,
        "aligned = reinterpret_cast<std::uintptr_t>(row) % 16 == 0;",
        "aligned = true;",
    ),
    Mutant(
        "sample-5",
        "two sums in a row share their memory",
        SHARED,
        "*turn ^= 1;",
        "",
    ),
    Mutant(
        "sample-6",
        "columns that pad a row are read",
        CHUNKS,
        "return max(0, min(vocab - first, kLaneElements));",
        "return kLaneElements;",
    ),
    Mutant(
        "sample-7",
        "no barrier between the drawn token and those who read it",
        ROW,
        "find_in_chunks(unit);\n    __syncthreads();",
        "find_in_chunks(unit);",
    ),
    Mutant(
        "sample-8",
        "a cut needs more than its share",
        CUTS,
        "reached[i] >= wanted ? 1 : 0",
        "reached[i] > wanted ? 1 : 0",
    ),
    Mutant(
        "sample-9",
        "a row with a NaN is not flagged",
        SAMPLE,
        "if (token == kBadRow) report(p.exec.status, b, kStatusNaN);",
        "",
    ),
    Mutant(
        "accept-1",
        "drafts are keyed by the golden token's position",
        ACCEPT,
        "std::int64_t{p.rows.positions[first]} + 1};",
        "std::int64_t{p.rows.positions[first]}};",
    ),
    Mutant(
        "accept-2",
        "what is left after a rejection is forgotten",
        ROW,
        "residual_ = residual;",
        "",
    ),
    Mutant(
        "accept-3",
        "probabilities that are none count as 0",
        ACCEPT,
        "if (columns == 0 || sums[1] != 0 ||",
        "if (columns == 0 ||",
    ),
    Mutant(
        "accept-4",
        "parents and token ids are believed",
        ACCEPT,
        "const bool bad = i < tree.size && !is_drafted_node(tree, i, p.rows.vocab);",
        "const bool bad = false;",
    ),
    Mutant(
        "accept-5",
        "choices are not written back",
        ACCEPT,
        "if (thread < size) p.sampled[first + thread] = shared.decided[thread];",
        "",
    ),
    Mutant(
        "accept-6",
        "all requests keep what is left in one place",
        ACCEPT,
        "residuals + b_ * residual_bytes(p_.rows.vocab)",
        "residuals",
    ),
    Mutant(
        "accept-7",
        "a residual of a reduced vocabulary begins with what the scratch held",
        ROW,
        "if (j < count) residual[first + j] = weight_of_score(x[j], first + j);",
        "",
    ),
]
