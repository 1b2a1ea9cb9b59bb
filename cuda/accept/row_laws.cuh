// What is known of every row of a step before somebody looks at one: its largest score, its law's
// cut and mass, and the token that its own number draws.
#pragma once

#include <cstdint>

#include "algo/law_cuts.h"
#include "backend/accept_ops.h"

namespace specdec::cuda {

// In place of a drawn token: the cut lies beyond the row's list, so who wants it has to look at the
// whole row.
inline constexpr TokenId kCutUnknown = -3;

// Arrays in a step's scratch; null: there was no room, and nothing is known.
struct RowLaws {
  std::uint32_t* tickets = nullptr;  // tasks taken so far
  std::uint64_t* best = nullptr;     // [rows] key of the largest score, and where its group begins
  Mass* total = nullptr;             // [rows] of the law before top_k and top_p
  unsigned* done = nullptr;          // [rows, 2] pieces searched, pieces weighed
  TokenId* drawn = nullptr;          // [rows] or what is wrong with the row
  LawCut* cut = nullptr;             // [rows] of a law that cuts, and was drawn from
  Mass* mass_of_chunk = nullptr;     // [rows, chunks] of a law that does not cut
  char* lists = nullptr;             // [rows, law_list_bytes] of a law that cuts; see RowList
  std::int64_t list_bytes = 0;
  std::int32_t chunks = 0;

  SPECDEC_HD explicit operator bool() const { return tickets != nullptr; }
  SPECDEC_HD Mass* masses_of(std::int32_t row) const {
    return mass_of_chunk + std::int64_t{row} * chunks;
  }
  // Does it hold something of the rows of this law?
  SPECDEC_HD static bool draws(const SamplingLaw& law) { return law.valid() && !law.greedy(); }
  // Is some of the law cut off by top_k or top_p?
  SPECDEC_HD static bool cuts(const SamplingLaw& law, std::int32_t vocab) {
    return top_k_of(law, vocab) > 0 || law.top_p < 1.0f;
  }
  SPECDEC_HD static std::int32_t top_k_of(const SamplingLaw& law, std::int32_t vocab) {
    return law.top_k < vocab ? law.top_k : 0;
  }
  // For a row that was drawn from.
  SPECDEC_HD LawCut cut_of(std::int32_t row, const SamplingLaw& law, std::int32_t vocab) const {
    if (cuts(law, vocab)) return cut[row];
    LawCut none;
    none.total = total[row];
    return none;
  }
};

struct RowLawsParams {
  ScoreRows rows;
  SamplingView sampling;
  RandomPurpose purpose = RandomPurpose::kToken;
  // [rows] within the request: a row's number is that of its depth below the request's first row.
  // Null: of its own position.
  const std::int32_t* parents = nullptr;
  TokenId* ids = nullptr;  // [rows] out: the largest score
  RowLaws laws;
  void* stream = nullptr;
};

// The arrays within exec.workspace, `offset` bytes from its start; none if they do not fit.
RowLaws place_row_laws(const ScoreRows& rows, const ExecutionContext& exec, std::int64_t offset);
void row_laws(const RowLawsParams& params);

// All rows' largest scores (ids), and their laws where the scratch from `offset` on is enough: else
// by argmax, with what there is.
RowLaws search_rows(RowLawsParams params, const ExecutionContext& exec, std::int64_t offset);

}  // namespace specdec::cuda
