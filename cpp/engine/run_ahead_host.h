// A request whose tokens the host chooses from scores: a score processor, logprobs. It takes part
// in a step only when none of its own is in flight (depth 0), while others run ahead. For the
// device it is a prompt that grows by a token at a time: no slot, no drafts.
#pragma once

#include <vector>

#include "algo/sample.h"
#include "engine/request.h"
#include "engine/score_processor.h"

namespace specdec {

// Rows of one step that the host may choose from; others wait for their turn.
inline constexpr int kMaxHostRows = 8;

// Does the device not suffice?
inline bool needs_host_choice(const RequestParams& p) {
  return p.min_tokens > 0 || p.processors.any() || p.needs_scores || p.logprobs.has_value();
}

struct HostChoice {
  HostChoice(RequestParams request, int vocab_size)
      : params(std::move(request)), processor(params, vocab_size) {}

  // The token after `text`, from its row of scores (changed by the caller's processors, if it has
  // any): as plain decoding chooses it. Negative: kBadRow, kNothingAllowed.
  TokenId choose(const std::vector<TokenId>& text, const float* scores, int vocab_size);

  RequestParams params;  // without the prompt
  ScoreProcessor processor;
  TokenSampler sampler;
  std::vector<float> row;  // after the request's own processors
  int num_output = 0;
};

}  // namespace specdec
