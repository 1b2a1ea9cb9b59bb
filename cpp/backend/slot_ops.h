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
  std::int32_t num_requests = 0;             // B
  std::int32_t num_rows = 0;                 // R of the arrays below
  TokenId* tokens = nullptr;                 // [R]
  std::int32_t* parents = nullptr;           // [R] within the request
  std::int32_t* cu_rows = nullptr;           // [B + 1]
  std::int32_t* kv_len = nullptr;            // [B] tokens in the cache: all but the golden one
  ExecutionContext exec;
};

// Acceptance, stop rules, history and drafter of each request. Request b's choices are
// sampled[cu_logits[b] .. cu_logits[b + 1]): one for each node of its tree, or one for a prompt's
// last row; a request without rows (a prompt's other chunks) is left as it is. A number of rows
// that is not the tree's, or that lies outside sampled, sets kStatusBadLength and leaves the slot
// as it is.
struct CommitStepParams {
  SlotPoolView slots;
  const std::int32_t* slot_ids = nullptr;   // [B]
  const std::int32_t* cu_logits = nullptr;  // [B + 1]
  const TokenId* sampled = nullptr;         // [num_sampled] -1: the row's scores hold a NaN
  std::int32_t num_sampled = 0;
  std::int32_t num_requests = 0;
  SlotResult* results = nullptr;     // [B]
  std::int32_t* path = nullptr;      // [B, kMaxStepTokens] as CompactKvParams takes it
  std::int32_t* path_len = nullptr;  // [B]
  ExecutionContext exec;
};

}  // namespace specdec
