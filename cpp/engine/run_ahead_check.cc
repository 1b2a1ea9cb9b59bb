// What the run-ahead executor refuses, and the bounds that follow from what was asked for.
#include "engine/run_ahead_check.h"

#include <algorithm>

#include "base/check.h"
#include "engine/run_ahead.h"

namespace specdec {

const RunAheadConfig& checked_config(const RunAheadConfig& c) {
  SPECDEC_REQUIRE(c.depth >= 0 && c.depth <= kMaxRunAhead, "run_ahead = ", c.depth, ": give 0..",
                  kMaxRunAhead);
  if (c.method == DraftMethod::kExternal) {
    SPECDEC_REQUIRE(c.external_max_draft_len >= 1 && c.external_max_draft_len <= kMaxDraftLen,
                    "external_max_draft_len = ", c.external_max_draft_len, ": give 1..",
                    kMaxDraftLen);
    SPECDEC_REQUIRE(c.external_max_path >= 1 && c.external_max_path <= c.external_max_draft_len,
                    "external_max_path = ", c.external_max_path, ": give 1..",
                    c.external_max_draft_len, ", the drafts of a step");
  }
  SPECDEC_REQUIRE(!c.ngram.is_public_pool || c.method != DraftMethod::kNgram,
                  "run_ahead: a public n-gram pool lives on the host; set is_public_pool=False or "
                  "leave run_ahead out");
  SPECDEC_REQUIRE(c.vocab_size >= 1, "vocab_size = ", c.vocab_size, ": at least 1");
  SPECDEC_REQUIRE(c.max_batch_size >= 1 && c.max_batch_size <= 4096,
                  "max_batch_size = ", c.max_batch_size, ": give 1..4096");
  SPECDEC_REQUIRE(c.max_seq_len >= 2, "max_seq_len = ", c.max_seq_len, ": at least 2");
  SPECDEC_REQUIRE(c.max_num_tokens >= c.max_batch_size, "max_num_tokens = ", c.max_num_tokens,
                  ": a step needs at least one row per request, max_batch_size = ",
                  c.max_batch_size, "; raise max_num_tokens or lower max_batch_size");
  SPECDEC_REQUIRE(c.method != DraftMethod::kNgram ||
                      (c.ngram.max_draft_len >= 1 && c.ngram.max_draft_len <= kMaxDraftLen),
                  "max_draft_len = ", c.ngram.max_draft_len, ": give 1..", kMaxDraftLen);
  return c;
}

bool brings_chains(const RunAheadConfig& c) {
  return c.method == DraftMethod::kExternal && c.external_max_path == c.external_max_draft_len;
}

void RunAheadExecutor::check_schedule() const {
  const int most = max_rows_per_request() - 1;
  int before = 0;
  for (const auto& [batch, length] : config_.draft_len_schedule) {
    SPECDEC_REQUIRE(batch > before, "draft_len_schedule: batch size ", batch,
                    " does not come after ", before, ": give ascending sizes from 1 on");
    SPECDEC_REQUIRE(length >= 0 && length <= most, "draft_len_schedule[", batch, "] = ", length,
                    " is outside 0..", most, ", the drafts that this engine can make");
    before = batch;
  }
}

int RunAheadExecutor::max_drafts(const RequestParams& p) const {
  if (!p.speculative || p.max_tokens <= 1) return 0;
  if (config_.method == DraftMethod::kLookahead) {
    const LookaheadConfig triple = p.lookahead.value_or(config_.lookahead);
    return static_cast<int>(lookahead_max_draft_len(triple.w, triple.n, triple.g));
  }
  if (config_.method == DraftMethod::kNgram) {
    return p.max_draft_len.value_or(config_.ngram.max_draft_len);
  }
  if (config_.method == DraftMethod::kExternal) {
    return p.max_draft_len.value_or(config_.external_max_draft_len);
  }
  return 0;
}

int RunAheadExecutor::max_rows_per_request() const {
  RequestParams any;
  any.max_tokens = config_.max_seq_len;
  return 1 + max_drafts(any);
}

// Drafts of one step that can be accepted.
int RunAheadExecutor::max_path(const RequestParams& p, int drafts) const {
  if (config_.method == DraftMethod::kExternal) {
    return std::min(drafts, config_.external_max_path);
  }
  if (config_.method != DraftMethod::kLookahead) return drafts;
  return std::min(drafts,
                  static_cast<int>(lookahead_max_depth(p.lookahead.value_or(config_.lookahead))));
}

void RunAheadExecutor::check(const RequestParams& p) const {
  auto check_id = [&](const char* field, TokenId id) {
    SPECDEC_REQUIRE(id >= 0 && id < config_.vocab_size, field, " holds token id ", id,
                    ": this model's ids are 0..", config_.vocab_size - 1);
  };
  auto refuse = [](bool given, const char* field, const char* why) {
    SPECDEC_REQUIRE(!given, field, " ", why,
                    ", which run_ahead does not serve: leave it out, or make the engine without "
                    "run_ahead");
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
  for (TokenId id : p.stop_token_ids) check_id("stop_token_ids", id);
  const std::size_t ids = p.eos_token_ids.size() + p.stop_token_ids.size();
  SPECDEC_REQUIRE(ids <= static_cast<std::size_t>(kMaxSlotStopIds), ids,
                  " end and stop ids together: run_ahead holds ", kMaxSlotStopIds,
                  ": give fewer stop_token_ids");
  check_sampling(p);
  check_processors(p, config_.vocab_size);
  SPECDEC_REQUIRE(p.sampling.greedy() || config_.vocab_size <= kMaxLawTokens,
                  "temperature: a vocabulary of ", config_.vocab_size, " tokens, at most ",
                  kMaxLawTokens, " can be drawn from");
  refuse(p.prompt_logprobs.has_value(), "prompt_logprobs", "needs whole rows of scores");
  refuse(p.return_logits, "return_generation_logits", "needs whole rows of scores");
  refuse(!p.external_drafts.empty(), "external_draft", "brings drafts of its own");
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
    const bool external = config_.method == DraftMethod::kExternal;
    SPECDEC_REQUIRE(config_.method == DraftMethod::kNgram || external,
                    "the request sets max_draft_len = ", *p.max_draft_len,
                    " but the engine was not built for prompt lookup: pass "
                    "speculative_config=NGramDecodingConfig(...)");
    const int most = external ? config_.external_max_draft_len : config_.ngram.max_draft_len;
    SPECDEC_REQUIRE(*p.max_draft_len >= 0 && *p.max_draft_len <= most,
                    "the request's max_draft_len = ", *p.max_draft_len, " is outside 0..", most,
                    ", the engine's max_draft_len");
  }
}

}  // namespace specdec
