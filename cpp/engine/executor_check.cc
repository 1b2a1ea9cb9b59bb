// What an executor refuses: contradictions of its configuration, and requests beyond it.
#include <cmath>

#include "algo/law_mass.h"
#include "base/check.h"
#include "engine/executor.h"
#include "engine/executor_request.h"
#include "engine/synthetic_rates.h"

namespace specdec {

int max_drafts_of(const LookaheadConfig& triple) {
  return static_cast<int>(lookahead_max_draft_len(triple.w, triple.n, triple.g));
}

int max_drafts_of(const ExecutorConfig& config) {
  switch (config.method) {
    case DraftMethod::kNone:
      return 0;
    case DraftMethod::kLookahead:
      return max_drafts_of(config.lookahead);
    case DraftMethod::kNgram:
      return config.ngram.max_draft_len;
    case DraftMethod::kExternal:
      return config.external_max_draft_len;
  }
  return 0;
}

namespace {

void check_config(const ExecutorConfig& c) {
  SPECDEC_REQUIRE(c.vocab_size >= 1, "vocab_size = ", c.vocab_size, ": at least 1");
  SPECDEC_REQUIRE(c.vocab_size <= kMaxLawTokens, "vocab_size = ", c.vocab_size, ": at most ",
                  kMaxLawTokens, " tokens can be drawn from");
  SPECDEC_REQUIRE(c.max_batch_size >= 1 && c.max_batch_size <= 4096,
                  "max_batch_size = ", c.max_batch_size, ": give 1..4096");
  SPECDEC_REQUIRE(c.max_seq_len >= 2, "max_seq_len = ", c.max_seq_len, ": at least 2");
  SPECDEC_REQUIRE(c.max_num_tokens >= c.max_batch_size, "max_num_tokens = ", c.max_num_tokens,
                  ": a step needs at least one row per request, max_batch_size = ",
                  c.max_batch_size, "; raise max_num_tokens or lower max_batch_size");
  if (c.method == DraftMethod::kLookahead) {
    check_lookahead_config(c.lookahead, "speculative_config");
  }
  if (c.method == DraftMethod::kExternal) {
    SPECDEC_REQUIRE(c.external_max_draft_len >= 1 && c.external_max_draft_len <= kMaxDraftLen,
                    "external_max_draft_len = ", c.external_max_draft_len, ": give 1..",
                    kMaxDraftLen);
  }
  if (c.method == DraftMethod::kNgram) {
    SPECDEC_REQUIRE(c.ngram.max_draft_len >= 1 && c.ngram.max_draft_len <= kMaxDraftLen,
                    "max_draft_len = ", c.ngram.max_draft_len, ": give 1..", kMaxDraftLen);
    SPECDEC_REQUIRE(
        c.ngram.max_matching_ngram_size >= 1 && c.ngram.max_matching_ngram_size <= kMaxNgram,
        "max_matching_ngram_size = ", c.ngram.max_matching_ngram_size, ": give 1..", kMaxNgram);
  }
}

void check_schedule(const ExecutorConfig& c) {
  int before = 0;
  for (const auto& [batch, length] : c.draft_len_schedule) {
    SPECDEC_REQUIRE(batch > before, "draft_len_schedule: batch size ", batch,
                    ": give sizes >= 1, ascending");
    SPECDEC_REQUIRE(length >= 0 && length <= max_drafts_of(c), "draft_len_schedule[", batch,
                    "] = ", length, ": give 0..", max_drafts_of(c), ", the engine's max_draft_len");
    before = batch;
  }
}

}  // namespace

const ExecutorConfig& checked_config(const ExecutorConfig& config) {
  check_config(config);
  check_schedule(config);
  check_synthetic_rates(config.synthetic_acceptance_rates);
  return config;
}

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
    SPECDEC_REQUIRE(!std::isnan(bias), "logit_bias[", id, "] is NaN: give a number");
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
}

void Executor::validate(const RequestParams& p) const {
  auto check_id = [&](const char* field, TokenId id) {
    SPECDEC_REQUIRE(id >= 0 && id < config_.vocab_size, field, " holds token id ", id,
                    ": this model's ids are 0..", config_.vocab_size - 1);
  };
  SPECDEC_REQUIRE(!p.prompt.empty(), "prompt_token_ids is empty: give at least one token");
  for (TokenId id : p.prompt) check_id("prompt_token_ids", id);
  SPECDEC_REQUIRE(static_cast<std::int64_t>(p.prompt.size()) < config_.max_seq_len,
                  "the prompt has ", p.prompt.size(), " tokens, max_seq_len is ",
                  config_.max_seq_len,
                  " and one more is needed to generate: shorten the prompt or "
                  "raise scheduler_config.max_seq_len");
  SPECDEC_REQUIRE(config_.enable_chunked_prefill ||
                      static_cast<std::int64_t>(p.prompt.size()) <= config_.max_num_tokens,
                  "the prompt has ", p.prompt.size(), " tokens, max_num_tokens is ",
                  config_.max_num_tokens,
                  ": raise scheduler_config.max_num_tokens or set enable_chunked_prefill=True");
  SPECDEC_REQUIRE(p.max_tokens >= 1, "max_tokens = ", p.max_tokens, ": at least 1");
  for (TokenId id : p.eos_token_ids) check_id("eos_token_ids", id);
  for (TokenId id : p.stop_token_ids) check_id("stop_token_ids", id);
  check_sampling(p);
  check_processors(p, config_.vocab_size);
  if (p.lookahead) {
    const LookaheadConfig& r = *p.lookahead;
    const LookaheadConfig& e = config_.lookahead;
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
        config_.method == DraftMethod::kNgram || config_.method == DraftMethod::kExternal,
        "the request sets max_draft_len = ", *p.max_draft_len,
        " but the engine was not built for prompt lookup or a drafter: pass "
        "speculative_config=NGramDecodingConfig(...)");
    SPECDEC_REQUIRE(*p.max_draft_len >= 0 && *p.max_draft_len <= max_drafts_of(config_),
                    "the request's max_draft_len = ", *p.max_draft_len, " is outside 0..",
                    max_drafts_of(config_), ", the engine's max_draft_len");
  }
  const auto num_drafts = static_cast<std::int64_t>(p.external_drafts.size());
  if (num_drafts > 0) {
    for (TokenId id : p.external_drafts) check_id("external_drafts", id);
    // Beside every other request's row the last prompt token and its drafts must fit into a step.
    const std::int64_t limit =
        config_.enable_chunked_prefill
            ? std::min(kMaxDraftLen, config_.max_num_tokens - config_.max_batch_size)
            : std::min<std::int64_t>(kMaxDraftLen, config_.max_num_tokens -
                                                       static_cast<std::int64_t>(p.prompt.size()));
    SPECDEC_REQUIRE(num_drafts <= limit, "the request brings ", num_drafts,
                    " external drafts, at most ", limit, " fit (step tokens ", kMaxStepTokens,
                    ", max_num_tokens ", config_.max_num_tokens, ", max_batch_size ",
                    config_.max_batch_size,
                    "): send fewer drafts or raise "
                    "scheduler_config.max_num_tokens");
  }
  SPECDEC_REQUIRE(pages_bound(p) <= pages_.num_pages(), "the request needs ", pages_bound(p),
                  " KV pages of ", pages_.page_size(), " tokens (prompt ", p.prompt.size(),
                  " + max_tokens ", p.max_tokens, " + drafts), the whole pool has ",
                  pages_.num_pages(), ": lower max_tokens or raise kv_cache_config.max_tokens");
}

}  // namespace specdec
