// The executor's private record of one request.
#pragma once

#include <memory>
#include <vector>

#include "engine/executor.h"

namespace specdec {

// Draft nodes of one step, at most.
int max_drafts_of(const LookaheadConfig& triple);
int max_drafts_of(const ExecutorConfig& config);

// The configuration itself; throws std::invalid_argument naming field, value and limit.
const ExecutorConfig& checked_config(const ExecutorConfig& config);

struct Executor::Request {
  Request(RequestId request_id, RequestParams request_params, int vocab_size)
      : id(request_id),
        params(std::move(request_params)),
        processor(params, vocab_size),
        history(params.prompt) {
    history.reserve(params.prompt.size() + static_cast<std::size_t>(params.max_tokens));
  }

  int prompt_len() const { return static_cast<int>(params.prompt.size()); }
  int num_output() const { return static_cast<int>(history.size()) - prompt_len(); }
  bool in_prefill() const { return prefilled < prompt_len(); }
  // No row of its own has been computed yet.
  bool untouched() const { return prefilled == num_cached && in_prefill(); }
  // Prompt tokens that may come from published pages: the last one is always computed, because its
  // row decides the first token. Logprobs of the prompt need all its rows.
  int reusable() const {
    return params.compute_whole_prompt || params.prompt_logprobs ? 0 : prompt_len() - 1;
  }
  bool wants_scores() const {
    return !params.sampling.greedy() || params.logprobs.has_value() || params.return_logits ||
           params.needs_scores || (params.prompt_logprobs && in_prefill()) ||
           processor.active(num_output());
  }

  RequestId id;
  RequestParams params;
  ScoreProcessor processor;
  std::vector<TokenId> history;  // prompt + output; the last token is the golden one
  int max_len = 0;               // history never grows beyond this
  int slot = -1;
  int prefilled = 0;    // prompt tokens whose K/V is in the cache
  int num_cached = 0;   // of them, how many lay in published pages when it started
  bool waited = false;  // once, for a prompt with the same start
  std::int64_t promised_pages = 0;
  bool cancelled = false;
  FinishReason finished = FinishReason::kNone;

  std::unique_ptr<Drafter> drafter;  // null: plain decoding
  DraftTree tree;                    // of the step in flight
  int step_rows = 0;                 // rows in the step in flight
  int step_max_path = 0;

  // Drafts are held against their own probabilities in the step in flight.
  bool accepts_by_probability() const {
    const AcceptanceRule rule = params.acceptance.rule;
    if (params.sampling.greedy() || rule == AcceptanceRule::kExactMatch || tree.size == 1) {
      return false;
    }
    return rule != AcceptanceRule::kRejection || tree_has_probs;
  }

  bool has_proposal = false;
  DraftTree proposal;         // node 0 unused
  DraftProbs proposal_probs;  // of `proposal`
  DraftProbs external_probs;  // of params.external_drafts
  DraftProbs step_probs;      // of the proposal that `tree` came from
  bool tree_has_probs = false;
  std::int32_t proposal_source[kMaxStepTokens] = {};  // draft of step_probs that a node of tree is
};

}  // namespace specdec
