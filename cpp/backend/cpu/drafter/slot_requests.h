// The requests of a step whose slots lie in host memory, as a network that drafts for them takes
// them.
#pragma once

#include <cstdint>

#include "backend/slot_ops.h"
#include "base/types.h"

namespace specdec::cpu {

struct SlotRequests {
  SlotPoolView slots;
  const std::int32_t* slot_ids = nullptr;    // [B], each slot at most once; -1: nobody
  const std::int32_t* max_drafts = nullptr;  // [B] drafts of this step, 0: none
  std::int32_t num_requests = 0;             // B
  // [slots.count, hidden_size]: the head's input that each slot's last token was chosen from
  const float* hidden = nullptr;
  std::int64_t hidden_size = 0;

  // Tokens of request b's text if it may draft, else 0.
  std::int32_t len_to_draft(std::int32_t b) const {
    const std::int32_t id = slot_ids[b];
    return slots.holds(id) ? slot_len_to_draft(slots.at(id), max_drafts[b]) : 0;
  }
  const float* hidden_of(std::int32_t b) const { return hidden + slot_ids[b] * hidden_size; }
};

}  // namespace specdec::cpu
