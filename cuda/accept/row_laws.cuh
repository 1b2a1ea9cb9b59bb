// What is known of every row of a step before somebody looks at one: its largest score, and where
// its law cuts nothing off (top_k, top_p), its masses and the token that its own number draws.
#pragma once

#include <cstdint>

#include "backend/accept_ops.h"

namespace specdec::cuda {

// Arrays in a step's scratch; null: there was no room, and nothing is known.
struct RowLaws {
  std::uint32_t* tickets = nullptr;  // tasks taken so far
  std::uint64_t* best = nullptr;     // [rows] key of the largest score, and its index
  Mass* total = nullptr;             // [rows] of the law
  unsigned* done = nullptr;          // [rows, 2] pieces searched, pieces weighed
  TokenId* drawn = nullptr;          // [rows] or what is wrong with the row
  Mass* mass_of_chunk = nullptr;     // [rows, chunks]
  std::int32_t chunks = 0;

  SPECDEC_HD explicit operator bool() const { return tickets != nullptr; }
  SPECDEC_HD Mass* masses_of(std::int32_t row) const {
    return mass_of_chunk + std::int64_t{row} * chunks;
  }
  // Does it hold masses of the rows of this law?
  SPECDEC_HD static bool weighs(const SamplingLaw& law) {
    return law.valid() && !law.greedy() && law.top_k == 0 && law.top_p == 1.0f;
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
