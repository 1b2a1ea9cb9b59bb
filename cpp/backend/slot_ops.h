// Parameter structs of the operations on slots (algo/slot.h): what a step does before and after the
// model where the requests live. As in ops.h: outputs are the caller's, nothing is allocated.
#pragma once

#include <cstdint>

#include "algo/slot.h"
#include "backend/ops.h"
#include "base/types.h"

namespace specdec {

// Slots of one pool: `count` blocks of `bytes` each.
struct SlotPoolView {
  std::byte* blocks = nullptr;  // 16-byte aligned
  std::int64_t bytes = 0;       // SlotLayout::bytes
  std::int32_t count = 0;

  SPECDEC_HD Slot* at(std::int32_t id) const {
    return reinterpret_cast<Slot*>(blocks + std::int64_t{id} * bytes);
  }
  SPECDEC_HD bool holds(std::int32_t id) const { return id >= 0 && id < count; }
};

// Drafts of each request, packed into the arrays of a step. Request b is slot slot_ids[b]; an id
// outside the pool (-1 pads a graph's bucket) and a frozen slot have no rows. A request whose rows
// do not fit into num_rows gets none and is flagged with kStatusBadLength; rows behind the last
// request hold token 0 and parent -1.
struct DraftStepParams {
  SlotPoolView slots;
  const std::int32_t* slot_ids = nullptr;    // [B], each slot at most once
  const std::int32_t* max_drafts = nullptr;  // [B] drafts of this step; null: as the slots allow
  // [B] each, of lookahead: window rows and guesses of this step; null: as the slots allow
  const std::int32_t* window_rows = nullptr;
  const std::int32_t* guesses = nullptr;
  std::int32_t num_requests = 0;    // B
  std::int32_t num_rows = 0;        // R of the arrays below
  TokenId* tokens = nullptr;        // [R]
  std::int32_t* parents = nullptr;  // [R] within the request
  std::int32_t* cu_rows = nullptr;  // [B + 1]
  std::int32_t* kv_len = nullptr;   // [B] tokens in the cache: all but the golden one
  ExecutionContext exec;

  SPECDEC_HD DraftShare share(std::int32_t b) const {
    DraftShare share;
    if (max_drafts != nullptr) share.max_drafts = max_drafts[b];
    if (window_rows != nullptr) share.window_rows = window_rows[b];
    if (guesses != nullptr) share.guesses = guesses[b];
    return share;
  }
};

// What accept_step wrote (AcceptStepParams); all null: nothing.
struct AcceptedView {
  const std::int32_t* path = nullptr;         // [B, kMaxStepTokens]
  const std::int32_t* path_len = nullptr;     // [B]
  const TokenId* emitted = nullptr;           // [B, kMaxStepTokens]
  const std::int32_t* num_emitted = nullptr;  // [B]

  SPECDEC_HD bool given() const { return path != nullptr; }
  // Request b's, by all ranks. Entries past the lengths, and all of them if the lengths are none,
  // are left alone.
  template <Team TeamT>
  SPECDEC_HD void load(const TeamT& team, std::int32_t b, AcceptResult* to) const {
    const std::int32_t length = path_len[b], tokens = num_emitted[b];
    const std::int64_t first = std::int64_t{b} * kMaxStepTokens;
    for (std::int32_t i = team.rank(); i < kMaxStepTokens; i += team.size()) {
      if (i < length) to->path[i] = path[first + i];
      if (i < tokens) to->emitted[i] = emitted[first + i];
    }
    if (team.rank() == 0) {
      to->path_len = length;
      to->num_emitted = tokens;
    }
    team.sync();
  }
};

// Acceptance, stop rules, history and drafter of each request. Request b's choices are
// sampled[cu_logits[b] .. cu_logits[b + 1]): one for each node of its tree, or one for a prompt's
// last row; a request without rows (a prompt's other chunks) is left as it is. A number of rows
// that is not the tree's, or that lies outside sampled, sets kStatusBadLength and leaves the slot
// as it is.
//
// Drafts are kept by greedy acceptance of `sampled`, or as accept_step decided: then `sampled` is
// what that left there, and a path that is none of the slot's tree sets kStatusBadTree and leaves
// the slot as it is.
struct CommitStepParams {
  SlotPoolView slots;
  const std::int32_t* slot_ids = nullptr;   // [B]
  const std::int32_t* cu_logits = nullptr;  // [B + 1]
  const TokenId* sampled = nullptr;         // [num_sampled] negative: the row has no token
  std::int32_t num_sampled = 0;
  std::int32_t num_requests = 0;
  AcceptedView accepted;
  SlotResult* results = nullptr;     // [B]
  std::int32_t* path = nullptr;      // [B, kMaxStepTokens] as CompactKvParams takes it
  std::int32_t* path_len = nullptr;  // [B]
  ExecutionContext exec;
};

// What operations in front of a step say about the requests' next tokens, into their slots
// (algo/proposed_draft.h). Left out: ids outside of the pool, slots of another method, frozen ones
// and those whose prompt has not been read. An entry that is no draft ends a request's drafts; if
// it is not the padding -1 it sets kStatusBadTree.
struct ProposeDraftsParams {
  SlotPoolView slots;
  const std::int32_t* slot_ids = nullptr;  // [B], each slot at most once
  const TokenId* tokens = nullptr;         // [B, width]
  const std::int32_t* parents = nullptr;   // [B, width] earlier drafts, -1: the golden token; null:
                                           // chains
  const float* survival = nullptr;         // [B, width] ProposedDraft::survival; null: unknown
  const std::int32_t* counts = nullptr;    // [B]; null: width
  std::int32_t width = 0, vocab_size = 0, num_requests = 0;
  ExecutionContext exec;
};

// The last `width` tokens of each history that wants drafts, its length, and how deep its drafts
// may go: all 0 for one that does not, or is shorter.
struct RecentTokensParams {
  SlotPoolView slots;
  const std::int32_t* slot_ids = nullptr;    // [B]
  const std::int32_t* max_drafts = nullptr;  // [B] of the step: 0 wants none; null: all do
  std::int32_t width = 0, num_requests = 0;
  TokenId* tokens = nullptr;     // [B, width]
  std::int32_t* lens = nullptr;  // [B]
  std::int32_t* room = nullptr;  // [B]; null: not wanted
  ExecutionContext exec;
};

// After a commit: the row that the last token of each request was chosen after, copied from the
// model's rows to the slot's place. Requests that got nothing or have ended keep what they had.
struct KeepHiddenParams {
  SlotPoolView slots;
  const std::int32_t* slot_ids = nullptr;   // [B]
  const std::int32_t* cu_logits = nullptr;  // [B + 1] as CommitStepParams, and its outputs:
  const SlotResult* results = nullptr;      // [B]
  const std::int32_t* path = nullptr;       // [B, kMaxStepTokens]
  const std::int32_t* path_len = nullptr;   // [B]
  const std::byte* hidden = nullptr;        // [num_rows] rows
  std::byte* kept = nullptr;                // [slots.count] rows
  std::int64_t row_bytes = 0;               // a multiple of 2
  std::int64_t hidden_stride = 0;           // bytes from row to row of `hidden`
  std::int32_t num_rows = 0, num_requests = 0;
  ExecutionContext exec;

  // The row of request b; -1: none.
  SPECDEC_HD std::int32_t row(std::int32_t b) const {
    const std::int32_t tokens = results[b].num_tokens, moved = path_len[b];
    if (!slots.holds(slot_ids[b]) || slots.at(slot_ids[b])->frozen() || tokens <= 0) return -1;
    // A path that was not moved lies in front of the other drafts.
    const std::int32_t node =
        moved > 0 ? path[std::int64_t{b} * kMaxStepTokens + moved - 1] : tokens - 1;
    const std::int32_t row = cu_logits[b] + node;
    return row >= 0 && row < num_rows ? row : -1;
  }
};

}  // namespace specdec
