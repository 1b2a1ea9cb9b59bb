// The host's side of slots: how large they are, and what a request's slot holds when it enters.
#pragma once

#include <cstdint>
#include <vector>

#include "algo/slot.h"
#include "base/types.h"

namespace specdec {

// Throws std::invalid_argument for a triple, pattern length or history that no slot can hold.
// `lookahead` and `max_ngram` count for their methods only.
SlotLayout make_slot_layout(SlotMethod method, std::int32_t max_seq_len,
                            const LookaheadConfig& lookahead, std::int32_t max_ngram);

// Throws std::invalid_argument naming the field. `what` names the place.
void check_suffix_lookup(const SuffixLookup& how, const char* what);

struct SlotRequest {
  std::vector<TokenId> prompt;
  std::int32_t max_tokens = 16;
  std::vector<TokenId> eos_token_ids;  // empty: end tokens are ignored
  std::vector<TokenId> stop_token_ids;
  bool speculative = true;
  LookaheadConfig lookahead;  // kLookahead: within the layout's
  NgramLookup ngram;          // kNgram
  SuffixLookup suffix;        // kSuffix
  std::uint64_t seed = 0;
};

// Bytes from the start of a slot that write_slot fills: what has to be copied to the device.
std::int64_t written_slot_bytes(const SlotRequest& request);

// Bytes of the drafter's part that a slot uses: by the length of its own text.
std::int64_t used_drafter_bytes(const Slot& slot);

// Fills the head and the history of a slot of `layout`; the drafter's part is made by the first
// commit. Throws std::invalid_argument naming the field, the limit and the remedy.
void write_slot(const SlotLayout& layout, const SlotRequest& request, void* block);

}  // namespace specdec
