// What an executor refuses of a request.
#include "base/check.h"

#include <cmath>
#include <limits>

#include "engine/executor.h"

namespace specdec {

void check_sampling(const RequestParams& p) {
  const SamplingLaw& law = p.sampling;
  SPECDEC_REQUIRE(std::isfinite(law.temperature) && law.temperature >= 0.0f,
                  "temperature = ", law.temperature,
                  ": a finite number >= 0 is needed (0: greedy)");
  SPECDEC_REQUIRE(law.top_k >= 0, "top_k = ", law.top_k, ": 0 (all tokens) or more is needed");
  SPECDEC_REQUIRE(law.top_p > 0.0f && law.top_p <= 1.0f, "top_p = ", law.top_p,
                  ": a number in (0, 1] is needed (1: all tokens)");
  SPECDEC_REQUIRE(law.min_p >= 0.0f && law.min_p <= 1.0f, "min_p = ", law.min_p,
                  ": a number in [0, 1] is needed (0: all tokens)");
  const AcceptanceParams& accept = p.acceptance;
  SPECDEC_REQUIRE(accept.posterior_threshold > 0.0f && accept.posterior_threshold <= 1.0f,
                  "posterior_threshold = ", accept.posterior_threshold,
                  ": a number in (0, 1] is needed");
  SPECDEC_REQUIRE(accept.posterior_alpha > 0.0f && accept.posterior_alpha <= 1.0f,
                  "posterior_alpha = ", accept.posterior_alpha, ": a number in (0, 1] is needed");
  SPECDEC_REQUIRE(accept.threshold > 0.0f && accept.threshold <= 1.0f,
                  "acceptance_threshold = ", accept.threshold, ": a number in (0, 1] is needed");
}

void check_processors(const RequestParams& p, int vocab_size) {
  auto check_id = [&](const char* field, TokenId id) {
    SPECDEC_REQUIRE(id >= 0 && id < vocab_size, field, " holds token id ", id,
                    ": this model's ids are 0..", vocab_size - 1);
  };
  SPECDEC_REQUIRE(p.min_tokens >= 0 && p.min_tokens <= p.max_tokens, "min_tokens = ", p.min_tokens,
                  ": give 0..max_tokens (", p.max_tokens, ")");
  for (const auto& [id, bias] : p.processors.logit_bias) {
    check_id("logit_bias", id);
    SPECDEC_REQUIRE(bias < std::numeric_limits<float>::infinity(), "logit_bias[", id, "] is ", bias,
                    ": give a number; -inf forbids the token");
  }
  for (TokenId id : p.processors.allowed_token_ids) check_id("allowed_token_ids", id);
  for (const auto& word : p.processors.bad_words) {
    SPECDEC_REQUIRE(!word.empty(), "bad_words holds an empty sequence: give at least one token");
    for (TokenId id : word) check_id("bad_words", id);
  }
  SPECDEC_REQUIRE(
      p.processors.repetition_penalty > 0.0f && std::isfinite(p.processors.repetition_penalty),
      "repetition_penalty = ", p.processors.repetition_penalty,
      ": a finite number above 0 (1 = off)");
  SPECDEC_REQUIRE(std::isfinite(p.processors.presence_penalty),
                  "presence_penalty = ", p.processors.presence_penalty, ": give a finite number");
  SPECDEC_REQUIRE(std::isfinite(p.processors.frequency_penalty),
                  "frequency_penalty = ", p.processors.frequency_penalty, ": give a finite number");
  SPECDEC_REQUIRE(!p.logprobs || (*p.logprobs >= 0 && *p.logprobs <= vocab_size),
                  "logprobs = ", p.logprobs.value_or(0), ": give 0..", vocab_size);
  SPECDEC_REQUIRE(
      !p.prompt_logprobs || (*p.prompt_logprobs >= 0 && *p.prompt_logprobs <= vocab_size),
      "prompt_logprobs = ", p.prompt_logprobs.value_or(0), ": give 0..", vocab_size);
  const bool each_step = p.logprobs || p.prompt_logprobs || p.return_logits || p.return_drafts;
  SPECDEC_REQUIRE(p.outputs_at_once == 1 || (p.outputs_at_once > 1 && !each_step),
                  "outputs_at_once = ", p.outputs_at_once,
                  ": give 1 or more, and 1 where logprobs, logits or drafts of each step are asked "
                  "for");
}

// Where steps run on a device: does that not suffice?
bool Executor::needs_host(const RequestParams& p) const {
  const bool scores = p.min_tokens > 0 || p.processors.any() || p.processes_scores || p.grammar ||
                      p.logprobs.has_value() || p.prompt_logprobs.has_value() || p.return_logits;
  return scores || p.return_drafts || !p.external_drafts.empty() || !p.prediction.empty() ||
         (p.speculative && drafts_on_host(config_));
}

// Besides every other request's row the last prompt token and its drafts must fit into a step.
int Executor::max_external_drafts(const RequestParams& p) const {
  const auto prompt_len = static_cast<std::int64_t>(p.prompt.size());
  const std::int64_t rows =
      config_.max_num_tokens -
      (config_.enable_chunked_prefill ? std::int64_t{config_.max_batch_size} : prompt_len);
  return static_cast<int>(std::min<std::int64_t>(kMaxDraftLen, rows));
}

void Executor::check(const RequestParams& p) const {
  auto check_id = [&](const char* field, TokenId id) {
    SPECDEC_REQUIRE(id >= 0 && id < config_.vocab_size, field, " holds token id ", id,
                    ": this model's ids are 0..", config_.vocab_size - 1);
  };
  SPECDEC_REQUIRE(!p.prompt.empty(), "prompt_token_ids is empty: give at least one token");
  for (TokenId id : p.prompt) check_id("prompt_token_ids", id);
  const auto prompt_len = static_cast<std::int64_t>(p.prompt.size());
  SPECDEC_REQUIRE(prompt_len < config_.max_seq_len, "the prompt has ", prompt_len,
                  " tokens, max_seq_len is ", config_.max_seq_len,
                  " and one more is needed to generate: shorten the prompt or raise "
                  "scheduler_config.max_seq_len");
  SPECDEC_REQUIRE(config_.enable_chunked_prefill || prompt_len <= config_.max_num_tokens,
                  "the prompt has ", prompt_len, " tokens, max_num_tokens is ",
                  config_.max_num_tokens,
                  ": raise scheduler_config.max_num_tokens or set enable_chunked_prefill=True");
  SPECDEC_REQUIRE(p.max_tokens >= 1, "max_tokens = ", p.max_tokens, ": at least 1");
  for (TokenId id : p.eos_token_ids) check_id("eos_token_ids", id);
  for (TokenId id : p.stop_token_ids) check_id("stop_token_ids", id);
  const std::size_t ids = p.eos_token_ids.size() + p.stop_token_ids.size();
  SPECDEC_REQUIRE(ids <= static_cast<std::size_t>(kMaxSlotStopIds), ids,
                  " end and stop ids together, at most ", kMaxSlotStopIds,
                  " fit: give fewer stop_token_ids");
  check_sampling(p);
  check_processors(p, config_.vocab_size);
  const auto scored = prompt_len + static_cast<std::int64_t>(p.external_drafts.size());
  SPECDEC_REQUIRE(host_ != nullptr || !p.prompt_logprobs || config_.enable_chunked_prefill ||
                      scored <= max_host_rows(),
                  "prompt_logprobs needs scores of ", scored,
                  " rows in one step (prompt and "
                  "external drafts), a step on a device brings those of ",
                  max_host_rows(), ": set enable_chunked_prefill=True, or overlap_depth='auto'");
  if (p.lookahead) {
    const LookaheadConfig &r = *p.lookahead, &e = config_.lookahead;
    SPECDEC_REQUIRE(config_.method == DraftMethod::kLookahead,
                    "the request brings a lookahead triple (", r.w, ", ", r.n, ", ", r.g,
                    ") but the engine was not built for lookahead: pass "
                    "speculative_config=LookaheadDecodingConfig(...)");
    check_lookahead_config(r, "lookahead_config of the request");
    SPECDEC_REQUIRE(lookahead_fits(r, e), "the request's lookahead triple (", r.w, ", ", r.n, ", ",
                    r.g, ") exceeds the engine's (", e.w, ", ", e.n, ", ", e.g,
                    "): each number must be at most the engine's");
  }
  if (p.max_draft_len) {
    SPECDEC_REQUIRE(
        config_.method != DraftMethod::kNone && config_.method != DraftMethod::kLookahead,
        "the request sets max_draft_len = ", *p.max_draft_len,
        " but the engine was not built for prompt lookup, suffix decoding or a drafter: pass "
        "speculative_config=SuffixDecodingConfig(...)");
    SPECDEC_REQUIRE(*p.max_draft_len >= 0 && *p.max_draft_len <= method_drafts_of(config_),
                    "the request's max_draft_len = ", *p.max_draft_len, " is outside 0..",
                    method_drafts_of(config_), ", the engine's max_draft_len");
  }
  if (p.suffix_draft_len) {
    const int most = config_.with_suffix ? config_.suffix.max_draft_len : 0;
    SPECDEC_REQUIRE(*p.suffix_draft_len >= 0 && *p.suffix_draft_len <= most,
                    "the request's suffix_draft_len = ", *p.suffix_draft_len, " is outside 0..",
                    most, ", what suffix decoding drafts beside the engine's method");
  }
  const auto num_drafts = static_cast<std::int64_t>(p.external_drafts.size());
  for (TokenId id : p.prediction) check_id("prediction", id);
  for (TokenId id : p.forced) check_id("forced", id);
  SPECDEC_REQUIRE(static_cast<std::int64_t>(p.prediction.size()) <= config_.max_seq_len,
                  "the prediction has ", p.prediction.size(), " tokens, max_seq_len is ",
                  config_.max_seq_len, ": shorten it");
  SPECDEC_REQUIRE(p.prediction.empty() || num_drafts == 0,
                  "the request brings a prediction and external drafts, which are both the text "
                  "behind the prompt: give one of them");
  if (num_drafts > 0) {
    for (TokenId id : p.external_drafts) check_id("external_drafts", id);
    const std::int64_t limit = max_external_drafts(p);
    SPECDEC_REQUIRE(num_drafts <= limit, "the request brings ", num_drafts,
                    " external drafts, at most ", limit, " fit (step tokens ", kMaxStepTokens,
                    ", max_num_tokens ", config_.max_num_tokens, ", max_batch_size ",
                    config_.max_batch_size,
                    "): send fewer drafts or raise "
                    "scheduler_config.max_num_tokens");
  }
}

}  // namespace specdec
