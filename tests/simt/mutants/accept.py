"""Mutants of drawing tokens and accepting drafts by probabilities."""

from __future__ import annotations

from mutants.model import Mutant

CUTS = "cpp/algo/law_cuts.h"
ROW = "cuda/accept/block_row.cuh"
CHUNKS = "cuda/accept/row_chunks.cuh"
SHARED = "cuda/accept/law_shared.cuh"
WEIGHTS = "cuda/accept/row_weights.cuh"
ROWS = "cuda/accept/row_laws.cu"
LISTS = "cuda/accept/row_lists.cuh"
SEARCH = "cuda/accept/row_search.cuh"
LISTED = "cuda/accept/row_listed.cuh"
CUT = "cuda/accept/row_cuts.cuh"
TASK = "cuda/accept/row_task.cuh"
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
    Mutant("sample-2", "min_p is ignored", WEIGHTS, "min_p(law.min_p) {}", "min_p(0.0f) {}"),
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
        "return min(vocab - first, kLaneElements);",
        "return kLaneElements;",
    ),
    Mutant(
        "sample-7",
        "no barrier between the drawn token and those who read it",
        ROW,
        "if (threadIdx.x == 0) shared_->token = token; } __syncthreads();",
        "if (threadIdx.x == 0) shared_->token = token; }",
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
    Mutant(
        "rows-4",
        "min_p goes the short way, which knows none",
        WEIGHTS,
        "min_p == 0.0f && inverse <= kLargestFloat",
        "inverse <= kLargestFloat",
    ),
    Mutant(
        "rows-5",
        "the chunk that is not full goes the short way",
        WEIGHTS,
        "min(end, row.vocab / kChunk)",
        "end",
    ),
    Mutant(
        "rows-6",
        "rows that begin anywhere go the short way",
        WEIGHTS,
        "row.aligned && weights.plain()",
        "weights.plain()",
    ),
    Mutant(
        "rows-7",
        "rows are weighed while they are searched",
        ROWS,
        "gpu::load_acquire(p.laws.done + 2 * row) <= static_cast<unsigned>(pieces)) {",
        "false) {",
    ),
    Mutant(
        "rows-8",
        "of equal largest scores the last one",
        SEARCH,
        "| ~static_cast<std::uint32_t>(best.index);",
        "| static_cast<std::uint32_t>(best.index);",
    ),
    Mutant(
        "rows-9",
        "a piece of another row's counter",
        ROWS,
        "count_piece(p.laws.done + 2 * row + 1, pieces + (owner.cuts ? 1 : 0), shared)",
        "count_piece(p.laws.done + 2 * (row ^ 1) + 1, pieces + (owner.cuts ? 1 : 0), shared)",
    ),
    Mutant(
        "rows-10",
        "counters begin with what the scratch held",
        ROWS,
        "words[i] = i < counters ? 0 : kNothingDrawn;",
        "if (i > 0) words[i] = i < counters ? words[i] : kNothingDrawn;",
    ),
    Mutant(
        "rows-11",
        "every row is keyed by the first row's position",
        TASK,
        "for (std::int32_t node = owner.node; node > 0; ++position) {",
        "for (std::int32_t node = 0; node > 0; ++position) {",
    ),
    Mutant(
        "rows-12",
        "the last piece's masses are not waited for",
        TASK,
        "gpu::atomic_add_acq_rel(done, 1u) + 1 == static_cast<unsigned>(pieces)",
        "atomicAdd(done, 1u) + 1 == static_cast<unsigned>(pieces)",
    ),
    Mutant(
        "rows-13",
        "no barrier between a ticket and the next",
        ROWS,
        "subtract_piece<T>(p, pieces, piece_chunks, shared); __syncthreads();  // they",
        "subtract_piece<T>(p, pieces, piece_chunks, shared);  // they",
    ),
    Mutant(
        "rows-14",
        "a row that was not drawn from is drawn from",
        ROWS,
        "if (threadIdx.x == 0) p.laws.drawn[row] = fault;",
        "if (threadIdx.x == 0) p.laws.drawn[row] = 0;",
    ),
    Mutant(
        "rows-15",
        "the mass of the last warp is left out",
        ROWS,
        "for (int w = 0; w < kRowWarps; ++w) sum",
        "for (int w = 0; w < kRowWarps - 1; ++w) sum",
    ),
    Mutant(
        "rows-16",
        "the last score of eight is not looked at",
        SEARCH,
        "fmaxf(x[6], x[7])",
        "x[6]",
    ),
    Mutant(
        "rows-17",
        "the first token of eight for the largest of them",
        SEARCH,
        "order_key(widen(row.scores[first + lane])) == key",
        "true",
    ),
    Mutant(
        "rows-18",
        "the first token of a group alone is listed",
        LISTS,
        "if (bins.behind(score[k][j]) < end) bits",
        "if (j == 0 && bins.behind(score[k][j]) < end) bits",
    ),
    Mutant(
        "rows-19",
        "listed tokens have no weight",
        LISTED,
        "law.candidates[i].weight = weights.of(score_of_key(law.candidates[i].key));",
        "",
    ),
    Mutant(
        "rows-20",
        "top_p cuts within a list that does not hold its mass",
        ROW,
        "if (kept_mass(*this) < wanted_mass(law.top_p, total)) return false;",
        "",
        harmless="draw_listed() has left such a row before: what comes here is crowded",
    ),
    Mutant(
        "rows-21",
        "top_k cuts within a list of fewer tokens",
        ROW,
        "if (!all && static_cast<Mass>(law.top_k) > shared_->listed) return false;",
        "",
    ),
    Mutant(
        "rows-22",
        "every list holds all",
        LISTS,
        "made.all = reach == kUsedBins;",
        "made.all = true;",
    ),
    Mutant(
        "rows-23",
        "a row is drawn from before its list is made",
        ROWS,
        "pieces + (owner.cuts ? 1 : 0), shared)",
        "pieces, shared)",
    ),
    Mutant(
        "rows-24",
        "a cut is not written down",
        CUT,
        "if (threadIdx.x == 0) *drawn_from = {cut.key_floor, cut.id_floor, false, all};",
        "",
    ),
    Mutant(
        "rows-25",
        "what lies beyond the list counts as drawn",
        SAMPLE,
        "if (token == kCutUnknown) drawn = false;",
        "",
    ),
]
