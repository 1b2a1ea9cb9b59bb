// What the host accepts of a step's drafts, and the token after them: from ids, or from scores with
// a request's own processors, law and rule.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "algo/acceptance.h"
#include "algo/sample.h"
#include "algo/synthetic_acceptance.h"
#include "backend/backend.h"
#include "engine/request.h"
#include "engine/score_processor.h"
#include "engine/token_mask.h"
#include "tree/draft_tree.h"

namespace specdec {

// What the drafts of one proposal were drawn from; copied.
struct ProposedProbs {
  const float* data = nullptr;  // [rows, columns]; null: they were chosen without chance
  std::int64_t row_stride = 0;  // elements
  std::int32_t rows = 0, columns = 0;
  const TokenId* vocab_ids = nullptr;  // [columns] a reduced vocabulary; null: all tokens
  bool replacement = false;            // siblings were drawn with replacement
};

// What the caller says of requests whose tokens the host chooses.
struct HostWords {
  std::map<RequestId, std::string> errors;  // their processor or grammar failed: they end with it
  // For every tree with a grammar. No rows: none of them changes a choice of the tree.
  std::map<RequestId, TokenMasks> masks;
};

// Scores that the caller's own processors changed between the forward pass and commit().
struct ScoreChanges {
  const float* raw = nullptr;  // the model's own, for logprobs; null: nothing was changed
  std::int64_t raw_stride = 0;
  HostWords words;
};

// A tree whose scores the caller's own processors change, or a grammar masks.
struct ChoiceTree {
  RequestId request = 0;
  int first = 0;  // its root among the step's rows of scores
  int fixed = 0;  // nodes from the root on that cut() leaves where they are
  bool processed = false, masked = false;  // which of the two, or both
  // The best token that a mask allows follows each node: no other processor changes its scores, so
  // that a mask matters only where the best of all tokens is not allowed.
  bool greedy = false;
  std::int32_t prompt_len = 0;
  std::vector<TokenId> history;  // up to the root, which is its last token
  std::vector<TokenId> tokens;
  std::vector<std::int32_t> parents;
};

// What one request's acceptance reads: the rows of its part of a step.
struct PlaceRows {
  int first = 0;                  // among the step's rows of scores
  const float* scores = nullptr;  // [rows, V] after processors; null: `sampled` has best tokens
  std::int64_t stride = 0;
  const float* raw = nullptr;  // [rows, V] the model's own, for logprobs
  std::int64_t raw_stride = 0;
  const TokenId* best = nullptr;  // [rows] of `scores`, -1 where one is NaN; null: to be found
  TokenId* sampled = nullptr;     // [rows] the token after each
};

// What the drafts of a step were drawn from, where operations in front of the step made them: of
// each decoding request of the step, in order, what each of its first `drafts_each` drafts was
// drawn from. The fields are AcceptStepParams' of the same names.
struct StepDraftProbs {
  const float* probs = nullptr;  // [requests, drafts_each, columns], dense; null: without chance
  std::int32_t requests = 0, drafts_each = 0, columns = 0;
  const TokenId* vocab_ids = nullptr;
  bool own_ids = false;
  const std::int32_t* draft_columns = nullptr;
  const std::uint8_t* has_probs = nullptr;
  const std::uint8_t* replacement = nullptr;

  bool drawn(std::int32_t request) const {
    return probs != nullptr && request >= 0 && request < requests &&
           (has_probs == nullptr || has_probs[request] != 0);
  }
};

// Hidden states of a step's choices, for drafters that go on from them: commit() keeps the row that
// each request's last token was chosen after at the request's slot.
struct HiddenRows {
  const std::byte* rows = nullptr;  // [num_logit_rows] rows; null: nobody asked
  std::byte* kept = nullptr;        // [max_batch_size] rows, dense
  std::int64_t stride = 0, row_bytes = 0;
};

// Not a token, nor what a draw answers for a row without a law.
inline constexpr TokenId kNotDrawn = -3;

// The token after the first row of a request's tree, where nothing but the row decides it.
struct RootDraw {
  const float* scores = nullptr;  // [V] of the row
  SamplingLaw law;
  double u = 0.0;  // of the token's place
  TokenId token = kNotDrawn;
};

// One request's step in front of acceptance.
struct HostChoice {
  const RequestParams& params;
  const ScoreProcessor& processor;
  const TokenId* history;  // prompt and output; its last token is the tree's root
  std::int32_t history_len;
  int num_output;
  const DraftTree& tree;
  const DraftProbs* probs = nullptr;      // null or not given: drafts were chosen without chance
  const std::int32_t* source = nullptr;   // [tree.size] draft of `probs` that a node is
  bool feeds_drafter = false;             // it looks at the best token of every row
  const StepDraftProbs* drawn = nullptr;  // of the slot's own drafts; null: without chance
  std::int32_t drawn_index = -1;          // the request's place in it
  const TokenMasks* masks = nullptr;      // of the tree's nodes; null: they change nothing
  // Drafts were cut by the grammar: the draft that each node was, [tree.size]; null: none was.
  const std::int32_t* uncut = nullptr;
  TokenId root_draw = kNotDrawn;  // the token after the first row, where it is drawn already
  const TokenId* best = nullptr;  // [tree.size] of the scores as they come; null: to be found
};

class HostAcceptor {
 public:
  HostAcceptor(int vocab_size, std::vector<double> synthetic_rates)
      : vocab_size_(vocab_size), synthetic_rates_(std::move(synthetic_rates)) {}

  // Fills *accepted, and sampled[node] for the root and the nodes of the accepted path: the token
  // that follows each; negative where a row has none. scores [tree.size, V], rows `row_stride`
  // elements apart; null: `sampled` holds the greedy choices already.
  void decide(const HostChoice& choice, const float* scores, std::int64_t row_stride,
              TokenId* sampled, AcceptResult* accepted);
  // True: RootDraw's token is what decide() would draw.
  bool draws_root(const RequestParams& params, const ScoreProcessor& processor, int num_output,
                  int tree_size) const;
  // Draws all of them, side by side on the threads of the process.
  void draw_roots(std::vector<RootDraw>& draws);

 private:
  const float* processed(const HostChoice& choice, int row, const float* raw);
  void find_best(const float* scores, std::int64_t row_stride, int rows, TokenId* ids);
  void find_unchanged(const HostChoice& choice, const float* scores, std::int64_t row_stride,
                      TokenId* ids);
  void sample(const HostChoice& choice, const float* scores, std::int64_t row_stride,
              TokenId* sampled);
  void accept_by_probability(const HostChoice& choice, const float* scores, std::int64_t row_stride,
                             TokenId* sampled, AcceptResult* accepted);
  void accept_drawn(const HostChoice& choice, const float* scores, std::int64_t row_stride,
                    TokenId* sampled, AcceptResult* accepted);
  void accept_synthetic(const HostChoice& choice, const float* scores, std::int64_t row_stride,
                        TokenId* sampled, AcceptResult* accepted);

  int vocab_size_;
  std::vector<double> synthetic_rates_;
  std::vector<float> processed_row_;   // [V] a row after its request's processors
  std::vector<float> processed_rows_;  // [tree, V] all of them
  CutDraftProbs cut_probs_;            // what kept drafts were drawn from
  TokenSampler sampler_;
  std::vector<TokenSampler> of_threads_;
  TreeAcceptor acceptor_;
};

}  // namespace specdec
