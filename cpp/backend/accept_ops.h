// Parameter structs of the operations that draw tokens and accept drafts by probabilities
// (algo/sample.h, algo/accept_rules.h). As in ops.h: outputs are the caller's, nothing is
// allocated.
#pragma once

#include <cstdint>

#include "algo/accept_rules.h"
#include "algo/sampling_law.h"
#include "algo/synthetic_acceptance.h"
#include "backend/ops.h"
#include "base/types.h"

namespace specdec {

// The laws of the requests of a step.
struct SamplingView {
  const float* temperature = nullptr;   // [B] 0: greedy
  const std::int32_t* top_k = nullptr;  // [B]
  const float* top_p = nullptr;         // [B]
  const float* min_p = nullptr;         // [B]
  const std::uint64_t* seed = nullptr;  // [B]

  SPECDEC_HD SamplingLaw law(std::int32_t b) const {
    return {temperature[b], top_k[b], top_p[b], min_p[b]};
  }
};

// Rows of scores of the requests of a step: those of request b are cu_logits[b] to
// cu_logits[b + 1]. Columns that pad a row to more than `vocab` are not read.
struct ScoreRows {
  const void* scores = nullptr;  // [rows, >= vocab], rows `row_stride` elements apart
  std::int64_t row_stride = 0;
  std::int32_t rows = 0, vocab = 0;         // vocab <= kMaxLawTokens
  DType dtype = DType::kF32;                // f32, f16 or bf16
  std::int32_t num_requests = 0;            // B
  const std::int32_t* cu_logits = nullptr;  // [B + 1]
  // [rows] absolute position of the row's own token; what is drawn after it stands one further.
  const std::int32_t* positions = nullptr;
};

// The token after each row: drawn by its request's law, the largest score where that is greedy.
// kBadRow and kStatusNaN for a row with a NaN (or, if drawn from, +infinity), kNothingAllowed for a
// drawn row of -infinity, kBadRow for a row of no request and for one with a law that is none,
// which sets kStatusBadLaw.
struct SampleRowsParams {
  ScoreRows rows;
  SamplingView sampling;
  RandomPurpose purpose = RandomPurpose::kToken;  // of the numbers drawn
  TokenId* ids = nullptr;                         // [rows]
  // [B, vocab], requests `probs_stride` elements apart, one row of scores each at most: the law
  // that the request's row was drawn from; left alone where it was not drawn. Null: not wanted.
  float* probs = nullptr;
  std::int64_t probs_stride = 0;
  ExecutionContext exec;  // workspace: row_laws_bytes; less makes it slower, not wrong
};

// Tokens of a row whose masses are added up to one number; tokens of which one largest score is
// kept, and how many of the likeliest tokens a row's list holds.
inline constexpr std::int32_t kLawChunk = 256, kLawGroup = 8, kLawListed = 2048;

// For a row with top_k or top_p: the largest scores of its groups, and later its list in their
// place.
constexpr std::int64_t law_list_bytes(std::int32_t vocab) {
  const std::int64_t chunks = (std::int64_t{vocab} + kLawChunk - 1) / kLawChunk;
  const std::int64_t groups = chunks * (kLawChunk / kLawGroup) * 4;
  const std::int64_t list = 16 + (vocab < kLawListed ? vocab : kLawListed) * std::int64_t{12};
  return ((groups > list ? groups : list) + 15) / 16 * 16;
}
// The scratch of all rows' laws: a queue; of each row its largest score, mass, counters, what comes
// after it, its draft, cut and chunks; tokens and the queue's entries; lists.
constexpr std::int64_t row_laws_bytes(std::int32_t rows, std::int32_t vocab) {
  const std::int64_t chunks = (std::int64_t{vocab} + kLawChunk - 1) / kLawChunk;
  if (rows <= 0) return 0;
  const std::int64_t words = 2 + rows * (4 + 6 + 3 + chunks) + (std::int64_t{rows} + 1) / 2 * 2;
  return (8 * words + 15) / 16 * 16 + rows * law_list_bytes(vocab);
}

// Bytes from one request's residual to the next.
constexpr std::int64_t residual_bytes(std::int32_t vocab) {
  return (std::int64_t{vocab} * static_cast<std::int64_t>(sizeof(float)) + 255) / 256 * 256;
}

// Workspace that accept_step cannot do without on an accelerator: what is left of each request's
// law after a draft was rejected. With row_laws_bytes behind it the rows are not looked at one
// after another.
constexpr std::int64_t accept_scratch_bytes(std::int32_t num_requests, std::int32_t vocab,
                                            bool has_probs) {
  return has_probs ? num_requests * residual_bytes(vocab) : 0;
}

// Accepted drafts and the token after them. The rows of a request are the nodes of its tree, row 0
// the root; a request without rows is left alone.
//   kStatusBadTree    parents are no tree of at most kMaxStepTokens nodes, or a draft is no token
//                     id
//   kStatusBadLength  rows outside the arrays
//   kStatusBadLaw     the law, the rule or a synthetic rate is none
// Such a request accepts and emits nothing.
//   kStatusBadProbs   a draft that was reached has probabilities that are none: it and its later
//                     siblings are not looked at, the token is drawn from what is left
//   kStatusNaN        the path led to a row with a NaN; the token after it is not emitted
struct AcceptStepParams {
  ScoreRows rows;
  SamplingView sampling;
  const TokenId* tokens = nullptr;        // [rows]
  const std::int32_t* parents = nullptr;  // [rows] within the request
  const std::uint8_t* rule = nullptr;     // [B] AcceptanceRule
  // [B] as in AcceptanceParams; null: its defaults.
  const float* posterior_threshold = nullptr;
  const float* posterior_alpha = nullptr;
  const float* threshold = nullptr;
  SyntheticRates synthetic;  // given: they decide how many drafts are kept, and no rule

  // What drafts were drawn from; null: they were chosen without chance. A token without a column
  // has probability 0. Either a row for each row of the scores (`drafts_each` = 0; roots' are not
  // read), or for each of the last requests, from `first_drafted` on, one for each of its first
  // `drafts_each` drafts.
  const float* probs = nullptr;  // [probabilities' rows, columns], `probs_stride` elements apart
  std::int64_t probs_stride = 0;
  std::int32_t columns = 0, drafts_each = 0, first_drafted = 0;
  // [columns], each token once; null: column = token. With `own_ids` each row of probabilities has
  // its own, -1 for a column of nothing.
  const TokenId* vocab_ids = nullptr;
  bool own_ids = false;
  // [probabilities' rows] where the draft stands; null: at its token's column, which is looked for
  // among own ids.
  const std::int32_t* draft_columns = nullptr;
  const std::uint8_t* has_probs = nullptr;    // [B - first_drafted]; null: all
  const std::uint8_t* replacement = nullptr;  // [B - first_drafted]; null: none

  // [rows] the token after the root and after each node of the path; the largest score of other
  // rows, or what exact match drew there.
  TokenId* sampled = nullptr;
  std::int32_t* path = nullptr;         // [B, kMaxStepTokens] accepted rows within the request
  std::int32_t* path_len = nullptr;     // [B]
  TokenId* emitted = nullptr;           // [B, kMaxStepTokens]
  std::int32_t* num_emitted = nullptr;  // [B] path_len + 1, or path_len if that row has no token
  ExecutionContext exec;                // workspace: at least accept_scratch_bytes

  SPECDEC_HD AcceptanceParams acceptance(std::int32_t b) const {
    AcceptanceParams params;
    params.rule = static_cast<AcceptanceRule>(rule[b]);
    if (posterior_threshold != nullptr) params.posterior_threshold = posterior_threshold[b];
    if (posterior_alpha != nullptr) params.posterior_alpha = posterior_alpha[b];
    if (threshold != nullptr) params.threshold = threshold[b];
    return params;
  }
  SPECDEC_HD bool drawn_from_probs(std::int32_t b) const {
    return probs != nullptr && b >= first_drafted &&
           (has_probs == nullptr || has_probs[b - first_drafted] != 0);
  }
  SPECDEC_HD bool with_replacement(std::int32_t b) const {
    return replacement != nullptr && replacement[b - first_drafted] != 0;
  }
  // What is said about a node of a request's tree: its row of probabilities (null: there is none),
  // the tokens of the columns, and where the draft stands among them (-1: nowhere).
  SPECDEC_HD DraftLaw law_of(std::int32_t b, std::int32_t node) const {
    const std::int32_t row = rows.cu_logits[b] + node;
    if (drafts_each > 0 && node > drafts_each) return {nullptr, nullptr, columns, -1, 0.0};
    const std::int64_t at =
        drafts_each == 0 ? row : std::int64_t{b - first_drafted} * drafts_each + node - 1;
    const TokenId token = tokens[row];
    const TokenId* ids = vocab_ids == nullptr ? nullptr : vocab_ids + (own_ids ? at * columns : 0);
    std::int32_t column = draft_columns == nullptr ? token : draft_columns[at];
    if (own_ids && draft_columns == nullptr) {
      for (column = columns - 1; column >= 0 && ids[column] != token;) --column;
    }
    const bool found =
        column >= 0 && column < columns && (ids == nullptr ? column : ids[column]) == token;
    return {probs + at * probs_stride, ids, columns, found ? column : -1, 0.0};
  }
};

// accept_step with synthetic rates for requests that are all greedy, when the target's choices are
// there and its scores are not. Flags and results as there.
struct SyntheticStepParams {
  SyntheticRates rates;
  std::int32_t rows = 0, vocab = 0, num_requests = 0;  // R, V, B
  const std::int32_t* cu_logits = nullptr;             // [B + 1]
  const std::int32_t* positions = nullptr;             // [R] of each row's own token
  const TokenId* tokens = nullptr;                     // [R]
  const std::int32_t* parents = nullptr;               // [R] within the request
  const std::uint64_t* seed = nullptr;                 // [B]
  // [R] in: the target's choice after each row, negative: a NaN. Out: the token after the root and
  // after each node of the path; other rows are left alone.
  TokenId* sampled = nullptr;
  std::int32_t* path = nullptr;         // [B, kMaxStepTokens]
  std::int32_t* path_len = nullptr;     // [B]
  TokenId* emitted = nullptr;           // [B, kMaxStepTokens]
  std::int32_t* num_emitted = nullptr;  // [B]
  ExecutionContext exec;
};

// The rows of request b lie within the arrays and do not decrease.
SPECDEC_HD inline bool has_rows(const std::int32_t* cu_logits, std::int32_t rows, std::int32_t b) {
  const std::int32_t first = cu_logits[b], end = cu_logits[b + 1];
  return first >= 0 && end >= first && end <= rows;
}
SPECDEC_HD inline bool has_rows(const ScoreRows& rows, std::int32_t b) {
  return has_rows(rows.cu_logits, rows.rows, b);
}

}  // namespace specdec
