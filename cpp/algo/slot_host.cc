#include "algo/slot_host.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace specdec {
namespace {

constexpr std::int64_t aligned(std::int64_t bytes) { return (bytes + 15) / 16 * 16; }

void check_request(const SlotLayout& layout, const SlotRequest& r) {
  const auto prompt_len = static_cast<std::int64_t>(r.prompt.size());
  SPECDEC_REQUIRE(prompt_len >= 1, "slot.prompt is empty: give at least one token");
  SPECDEC_REQUIRE(prompt_len < layout.max_seq_len, "slot.prompt has ", prompt_len,
                  " tokens, max_seq_len is ", layout.max_seq_len,
                  " and one more is needed to generate: shorten the prompt");
  SPECDEC_REQUIRE(*std::min_element(r.prompt.begin(), r.prompt.end()) >= 0,
                  "slot.prompt holds a negative token id");
  SPECDEC_REQUIRE(r.max_tokens >= 1, "slot.max_tokens = ", r.max_tokens, ": at least 1");
  const std::size_t ids = r.eos_token_ids.size() + r.stop_token_ids.size();
  SPECDEC_REQUIRE(ids <= static_cast<std::size_t>(kMaxSlotStopIds), "slot: ", ids,
                  " end and stop ids, a slot holds ", kMaxSlotStopIds,
                  ": give fewer stop_token_ids");
  if (layout.method == SlotMethod::kSuffix && r.speculative) {
    check_suffix_lookup(r.suffix, "slot.suffix");
  }
  if (layout.method == SlotMethod::kLookahead && r.speculative) {
    check_lookahead_config(r.lookahead, "slot.lookahead");
    SPECDEC_REQUIRE(lookahead_fits(r.lookahead, layout.lookahead), "slot.lookahead = [",
                    r.lookahead.w, ",", r.lookahead.n, ",", r.lookahead.g, "] exceeds the pool's [",
                    layout.lookahead.w, ",", layout.lookahead.n, ",", layout.lookahead.g,
                    "]: each number must be at most the pool's");
  }
}

}  // namespace

void check_suffix_lookup(const SuffixLookup& how, const char* what) {
  SPECDEC_REQUIRE(how.max_draft_len >= 0 && how.max_draft_len <= kMaxDraftLen, what,
                  ".max_draft_len = ", how.max_draft_len, ": give 0..", kMaxDraftLen);
  SPECDEC_REQUIRE(how.max_tree_depth >= 1 && how.max_tree_depth <= kMaxSuffixDepth, what,
                  ".max_tree_depth = ", how.max_tree_depth, ": give 1..", kMaxSuffixDepth);
  SPECDEC_REQUIRE(how.min_prob <= kSuffixOne, what,
                  ".min_token_prob = ", static_cast<double>(how.min_prob) / kSuffixOne,
                  ": give 0..1");
}

SlotLayout make_slot_layout(SlotMethod method, std::int32_t max_seq_len,
                            const LookaheadConfig& lookahead, std::int32_t max_ngram) {
  SPECDEC_REQUIRE(max_seq_len >= 2 && max_seq_len <= (1 << 28), "slots.max_seq_len = ", max_seq_len,
                  ": use 2..", 1 << 28);
  SlotLayout layout;
  layout.method = method;
  layout.max_seq_len = max_seq_len;
  layout.drafter_offset =
      aligned(static_cast<std::int64_t>(sizeof(Slot)) +
              std::int64_t{max_seq_len} * static_cast<std::int64_t>(sizeof(TokenId)));
  std::size_t drafter = 0;
  if (method == SlotMethod::kLookahead) {
    check_lookahead_config(lookahead, "slots.lookahead");
    layout.lookahead = lookahead;
    layout.pool_grams = lookahead_pool_grams(max_seq_len);
    drafter = lookahead_bytes_required(lookahead, layout.pool_grams);
  } else if (method == SlotMethod::kNgram) {
    SPECDEC_REQUIRE(max_ngram >= 1 && max_ngram <= kMaxNgram, "slots.max_ngram = ", max_ngram,
                    ": use 1..", kMaxNgram);
    layout.max_ngram = max_ngram;
    drafter = ngram_bytes_required(max_seq_len, ngrams_up_to(max_ngram));
  } else if (method == SlotMethod::kSuffix) {
    drafter = suffix_bytes_required(max_seq_len);
  } else if (method == SlotMethod::kProposed) {
    drafter = sizeof(ProposedDraft);
  }
  layout.bytes = aligned(layout.drafter_offset + static_cast<std::int64_t>(drafter));
  return layout;
}

std::int64_t written_slot_bytes(const SlotRequest& request) {
  return static_cast<std::int64_t>(sizeof(Slot) + request.prompt.size() * sizeof(TokenId));
}

std::int64_t used_drafter_bytes(const Slot& slot) {
  switch (slot.method) {
    case SlotMethod::kLookahead:
      return static_cast<std::int64_t>(lookahead_bytes_required(slot.lookahead, slot.pool_grams));
    case SlotMethod::kNgram:
      return static_cast<std::int64_t>(
          ngram_bytes_required(slot.max_len, ngrams_up_to(slot.max_ngram)));
    case SlotMethod::kSuffix:
      return static_cast<std::int64_t>(suffix_bytes_required(slot.max_len));
    case SlotMethod::kProposed:
      return static_cast<std::int64_t>(sizeof(ProposedDraft));
    case SlotMethod::kNone:
      break;
  }
  return 0;
}

void write_slot(const SlotLayout& layout, const SlotRequest& request, void* block) {
  check_request(layout, request);
  auto* slot = new (block) Slot{};
  slot->len = static_cast<std::int32_t>(request.prompt.size());
  slot->finish = static_cast<std::int32_t>(FinishReason::kNone);
  slot->max_len = static_cast<std::int32_t>(
      std::min<std::int64_t>(std::int64_t{slot->len} + request.max_tokens, layout.max_seq_len));
  const bool drafts = request.speculative && request.max_tokens > 1 &&
                      (layout.method != SlotMethod::kLookahead || request.lookahead.n > 1) &&
                      (layout.method != SlotMethod::kNgram || request.ngram.max_draft_len > 0) &&
                      (layout.method != SlotMethod::kSuffix || request.suffix.max_draft_len > 0);
  slot->method = drafts ? layout.method : SlotMethod::kNone;
  slot->lookahead = request.lookahead;
  slot->pool_grams = lookahead_pool_grams(slot->max_len);
  slot->max_ngram = layout.max_ngram;
  slot->ngram = request.ngram;
  slot->suffix = request.suffix;
  slot->seed = request.seed;
  slot->drafter_offset = layout.drafter_offset;
  slot->num_eos = static_cast<std::int32_t>(request.eos_token_ids.size());
  slot->num_stop_ids = static_cast<std::int32_t>(request.stop_token_ids.size());
  std::copy(request.eos_token_ids.begin(), request.eos_token_ids.end(), slot->stop_ids);
  std::copy(request.stop_token_ids.begin(), request.stop_token_ids.end(),
            slot->stop_ids + slot->num_eos);
  slot->tree.size = 0;
  std::memcpy(slot->history(), request.prompt.data(), request.prompt.size() * sizeof(TokenId));
}

}  // namespace specdec
