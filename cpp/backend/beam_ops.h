// Parameter structs of beam search on a step's stream (algo/beam_search.h).
#pragma once

#include <cstdint>

#include "algo/beam_search.h"
#include "backend/ops.h"

namespace specdec {

// The beams of D requests: [D, length, width] each, and how many depths each request's have.
struct BeamPoolView {
  TokenId* tokens = nullptr;
  std::int32_t* parents = nullptr;
  float* log_probs = nullptr;
  std::int32_t* reached = nullptr;  // [D]
  std::int32_t length = 0, width = 0;

  SPECDEC_HD BeamNodes at(std::int32_t request) const {
    const std::int64_t first = std::int64_t{request} * length * width;
    return {tokens + first, parents + first, log_probs + first, length, width};
  }
};

// One depth of all requests. Rows: one of each request at depth 0, `width` behind it.
struct GrowBeamsParams {
  BeamPoolView beams;
  const float* scores = nullptr;            // [rows, count], best first
  const std::int64_t* columns = nullptr;    // [rows, count], of the scores
  const TokenId* token_ids = nullptr;       // [num_scores]; null: the column
  const std::int32_t* num_beams = nullptr;  // [D]
  const std::int32_t* lengths = nullptr;    // [D]
  const float* temperatures = nullptr;      // [D]; null: 1
  std::int32_t count = 0, num_scores = 0, depth = 0, num_requests = 0;
  std::int32_t* next_rows = nullptr;  // [D, width]
  TokenId* next_tokens = nullptr;     // [D, width]
  ExecutionContext exec;

  SPECDEC_HD std::int32_t rows() const { return depth == 0 ? 1 : beams.width; }
  SPECDEC_HD BeamLimits limits_of(std::int32_t request) const {
    return {num_beams[request], lengths[request],
            temperatures == nullptr ? 1.0f : temperatures[request]};
  }
  SPECDEC_HD BeamScores scores_of(std::int32_t request) const {
    const std::int64_t first = std::int64_t{request} * rows() * count;
    return {scores + first, columns + first, token_ids, count, num_scores};
  }
  SPECDEC_HD BeamRows next_of(std::int32_t request) const {
    const std::int64_t first = std::int64_t{request} * beams.width;
    return {next_rows + first, next_tokens + first, request * rows()};
  }
};

// The draft tree of each request's beams, the likeliest drafts first.
struct MergeBeamsParams {
  BeamPoolView beams;
  std::int32_t num_requests = 0;
  TokenId* tokens = nullptr;        // [D, length * width], -1 behind a tree
  std::int32_t* parents = nullptr;  // [D, length * width], -1: the golden token
  std::int32_t* sources = nullptr;  // [D, length * width] node of each draft; null: not wanted
  std::int32_t* counts = nullptr;   // [D]
  ExecutionContext exec;

  SPECDEC_HD std::int64_t first(std::int32_t request) const {
    return std::int64_t{request} * beams.length * beams.width;
  }
  SPECDEC_HD std::int32_t* sources_of(std::int32_t request) const {
    return sources == nullptr ? nullptr : sources + first(request);
  }
};

}  // namespace specdec
