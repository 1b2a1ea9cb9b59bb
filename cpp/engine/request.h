// One request: what the caller asked for, and where it stands.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "algo/acceptance.h"
#include "algo/lookahead_state.h"
#include "algo/sample.h"
#include "algo/stop_rules.h"
#include "base/types.h"
#include "engine/chain_history.h"

namespace specdec {

// Score processors of one request; all of them see the history along a node's own path.
struct ProcessorParams {
  float repetition_penalty = 1.0f;  // on every token of prompt and output
  float presence_penalty = 0.0f;    // on every token of the output, once
  float frequency_penalty = 0.0f;   // on every token of the output, per occurrence
  std::vector<std::pair<TokenId, float>> logit_bias;
  std::vector<std::vector<TokenId>> bad_words;  // token sequences that must not appear
  std::vector<TokenId> allowed_token_ids;       // empty: all

  bool any() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f ||
           !logit_bias.empty() || !bad_words.empty() || !allowed_token_ids.empty();
  }
};

struct RequestParams {
  RequestId id = 0;  // of reserve(); 0: the next one
  std::vector<TokenId> prompt;
  int max_tokens = 16;
  int min_tokens = 0;
  std::vector<TokenId> eos_token_ids;
  std::vector<TokenId> stop_token_ids;
  bool ignore_eos = false;
  bool speculative = true;
  std::optional<LookaheadConfig> lookahead;  // absent: the executor's triple
  // Prompt lookup, drafts from outside: upper bound; absent: the executor's.
  std::optional<int> max_draft_len;
  std::optional<int> suffix_draft_len;  // the same of suffix decoding beside the method
  std::optional<bool> adaptive;         // absent: the executor's
  int priority = 0;  // a smaller one is admitted earlier and gives its pages back later
  std::uint64_t seed = 0;
  SamplingLaw sampling;
  AcceptanceParams acceptance;
  ProcessorParams processors;
  std::optional<int> logprobs;         // number of alternatives beside each delivered token
  std::optional<int> prompt_logprobs;  // the same for the prompt's tokens, from the second on
  bool processes_scores = false;       // the caller changes this request's scores before commit()
  bool grammar = false;        // commit() and deliver() bring masks of what may follow each node
  bool return_logits = false;  // StepOutput::logit_rows is wanted
  bool return_drafts = false;  // StepOutput::drafts is wanted
  bool compute_whole_prompt = false;  // every prompt token needs a row: nothing is taken over
  // A chain of drafts for what follows the prompt, verified in the pass that reads its last token.
  std::vector<TokenId> external_drafts;
  // What the output is expected to be: drafts are taken from it (engine/prediction.h), whatever the
  // executor's method is and whether the request speculates otherwise.
  std::vector<TokenId> prediction;
  // With a grammar: what it forces the output to begin with.
  std::vector<TokenId> forced;
  bool end_after_drafts = false;  // that pass is the whole request: finish reason kLength
  // Outputs of up to this many steps come as one (engine/output_queue.h), if not watched.
  int outputs_at_once = 1;
  // Requests share published pages and a public n-gram pool only if their salts are equal.
  std::string cache_salt;
};

// Throws std::invalid_argument for a law or an acceptance rule that is none.
void check_sampling(const RequestParams& params);
// The same for score processors, min_tokens and logprobs.
void check_processors(const RequestParams& params, int vocab_size);

constexpr const char* finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return "";
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kError:
      return "error";
  }
  return "";
}

struct TokenLogprobs {
  float logprob = 0.0f;
  int rank = 0;                                // 1 = the most likely token
  std::vector<std::pair<TokenId, float>> top;  // best first, ties by smaller id
};

// A draft that a step verified: node i + 1 of its tree is entry i of StepOutput::drafts.
struct VerifiedDraft {
  TokenId token = 0;
  int parent = -1;         // another entry; -1: it follows the golden token
  bool accepted = false;   // and delivered
  SourceBits sources = 0;  // who has proposed it
};

// What one step delivered to one request, or several steps of it (`parts`).
struct StepOutput {
  RequestId request_id = 0;
  std::int64_t step = -1;     // whose it is
  std::int64_t sequence = 0;  // grows from output to output (engine/output_queue.h)
  // The steps that it sums up, in order; none: it is one step's. Then `step`, `sequence`, the end
  // and what is said of single rows are the last one's, the counts are sums.
  std::vector<std::shared_ptr<StepOutput>> parts;
  bool is_prefill = false;
  std::vector<TokenId> tokens;  // delivered this step; the final token may be a stop token
  int num_rows = 0;             // rows of this request in the forward pass
  int num_cached_tokens = 0;    // prompt tokens whose K/V it took from published pages
  int num_drafts = 0;           // draft nodes verified
  int num_accepted = 0;         // of `tokens`, how many were accepted drafts
  // Where the host knows it: of num_drafts and of num_accepted, how many each source has proposed
  // (a draft may be of several), and who the accepted ones are of.
  struct SourceCount {
    int drafts = 0, accepted = 0;
  };
  std::array<SourceCount, kNumDraftSources> sources{};
  std::vector<SourceBits> accepted_by;
  int max_path = 0;  // the deepest draft node: what the step could have accepted
  // If asked for (return_drafts).
  std::vector<VerifiedDraft> drafts;
  // Logit row of the step whose token was delivered last: the golden token's, or the deepest
  // accepted draft's. -1: nothing was delivered.
  int last_logit_row = -1;
  std::vector<int> logit_rows;  // of every delivered token, if asked for (return_logits)
  FinishReason finish_reason = FinishReason::kNone;
  std::optional<TokenId> stop_token;  // the stop id (not the model's end token) that ended it
  std::string error;
  std::vector<TokenLogprobs> logprobs;  // one per token, if asked for
  std::vector<TokenLogprobs>
      prompt_logprobs;  // of the prompt tokens that this step's rows foretell
};

}  // namespace specdec
