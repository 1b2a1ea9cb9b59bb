// Applies a request's score processors to one row of scores, as plain decoding would have done at
// that position: the history is prompt + output + the draft tokens on the node's own path. Nothing
// is remembered from a row, so rejected drafts leave no trace.
//
// Order (as in vLLM): allowed ids, bad words, min_tokens, logit bias, then the penalties.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "engine/request.h"

namespace specdec {

// The score of a token that must not be chosen.
inline constexpr float kForbiddenScore = -std::numeric_limits<float>::infinity();

class ScoreProcessor {
 public:
  ScoreProcessor(const RequestParams& params, int vocab_size);

  // True while some processor can change a row when `num_output` tokens have been delivered.
  bool active(int num_output) const { return static_processors_ || num_output < min_tokens_; }

  // A token became final.
  void append(TokenId token);

  // In place. `history` is prompt and output (without the path), `path` the draft tokens of the
  // row's node, root excluded, in order.
  void apply(float* scores, const TokenId* history, int history_len, const TokenId* path,
             int path_len) const;

 private:
  void apply_bad_words(float* scores, const TokenId* history, int history_len, const TokenId* path,
                       int path_len) const;
  void apply_penalties(float* scores, const TokenId* path, int path_len) const;

  ProcessorParams params_;
  int vocab_size_;
  int min_tokens_;
  std::vector<TokenId> min_tokens_banned_;  // end and stop ids while the output is short
  bool static_processors_ = false;
  bool penalties_ = false;
  int num_output_ = 0;
  std::vector<std::uint8_t> allowed_;       // [V] when allowed_token_ids is given
  std::vector<std::int32_t> output_count_;  // [V] when there are penalties
  std::vector<std::uint8_t> seen_;          // [V] in prompt or output, when there are penalties
  std::vector<TokenId> distinct_;           // the ids with seen_ set
};

// Natural-log probabilities of a raw row: the chosen token's, its rank and the `num_top` best.
TokenLogprobs compute_logprobs(const float* scores, int vocab_size, TokenId token, int num_top);

}  // namespace specdec
