// Beam search for several requests at once where their scores come to the host. The network that
// makes them is elsewhere: start(), then per depth score the rows and advance(), until there are no
// rows. What is chosen: algo/beam_search.h.
#pragma once

#include <cstdint>
#include <vector>

#include "algo/beam_search.h"
#include "algo/top_scores.h"
#include "base/types.h"

namespace specdec {

struct BeamShape {
  std::int32_t num_beams = 1;
  std::int32_t length = 1;  // num_beams * length <= kMaxDraftLen
  float temperature = 1.0f;
  bool keeps_laws = false;  // tree_laws() will be asked for
};

// The prefix tree of a request's beams, the likeliest drafts first.
struct BeamTree {
  std::int32_t size = 0;
  TokenId tokens[kMaxDraftLen];
  std::int32_t parents[kMaxDraftLen];  // -1 for the golden token
  std::int32_t depths[kMaxDraftLen];   // from 1
  float log_probs[kMaxDraftLen];       // of the path
  std::int32_t sources[kMaxDraftLen];  // merge_beams
};

class BeamSearch {
 public:
  static constexpr std::int32_t kKept = 50;

  // Starts over. Every request has one row: its empty beam.
  void start(const std::vector<BeamShape>& shapes);

  // Beams of the current depth that want scores, request after request, best beam first.
  std::int32_t num_rows() const { return static_cast<std::int32_t>(row_parents_.size()); }
  // Which row of the depth before each of them extends, and its last token. Empty beams have
  // neither: row i is request i, token -1.
  const std::vector<std::int32_t>& row_parents() const { return row_parents_; }
  const std::vector<TokenId>& row_tokens() const { return row_tokens_; }
  const std::vector<float>& row_log_probs() const { return row_log_probs_; }

  // scores [num_rows, vocab_size], `stride` floats from row to row. token_ids [vocab_size] maps a
  // score's index to its token, null: the same number.
  void advance(const float* scores, std::int64_t stride, std::int32_t vocab_size,
               const TokenId* token_ids);

  std::int32_t num_requests() const { return static_cast<std::int32_t>(requests_.size()); }

  // The beams that request `r` has reached, cut to the `max_drafts` likeliest drafts.
  BeamTree tree(std::int32_t r, std::int32_t max_drafts);

  // What each node of that tree was chosen from: out [nodes, num_scores], zeroed here, column i is
  // the i-th score. For a request that keeps_laws.
  void tree_laws(std::int32_t r, std::int32_t max_drafts, std::int32_t num_scores, float* out);
  // The same as lists of tokens: probs and ids [nodes, kKept], 0 and -1 behind the last.
  void tree_laws(std::int32_t r, const BeamTree& tree, const TokenId* token_ids, float* probs,
                 TokenId* ids) const;

 private:
  struct Request {
    BeamShape shape;
    std::int32_t reached = 0;  // depths that have beams
    std::int32_t rows = 1;     // of this depth
    // [length, num_beams], as BeamNodes.
    std::vector<TokenId> tokens;
    std::vector<std::int32_t> parents;
    std::vector<float> log_probs;
    // keeps_laws: the best scores of each scored row, [length, num_beams, kKept].
    std::vector<float> scores;
    std::vector<std::int64_t> columns;

    BeamNodes nodes() {
      return {tokens.data(), parents.data(), log_probs.data(), shape.length, shape.num_beams};
    }
  };

  // Best first into row `row` of best_scores_ and best_columns_; it is reordered.
  void set_best(std::int64_t row, ScoredIndex* best, std::int32_t count);
  void make_rows();
  void grow_all(std::int32_t num_scores, const TokenId* token_ids);

  std::vector<Request> requests_;
  std::vector<std::int32_t> row_parents_;
  std::vector<TokenId> row_tokens_;
  std::vector<float> row_log_probs_;
  std::vector<float> best_scores_;          // [rows, kKept], -infinity behind the last
  std::vector<std::int64_t> best_columns_;  // [rows, kKept]
  BeamScratch scratch_;
};

}  // namespace specdec
