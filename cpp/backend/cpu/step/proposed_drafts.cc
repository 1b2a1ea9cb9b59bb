// What drafters on the stream need of slots in host memory.
#include <algorithm>
#include <cstring>

#include "algo/slot.h"
#include "backend/cpu/step/step_ops.h"

namespace specdec::cpu {

void propose_drafts(const ProposeDraftsParams& p) {
  for (std::int32_t b = 0; b < p.num_requests; ++b) {
    if (!p.slots.holds(p.slot_ids[b])) continue;
    Slot* slot = p.slots.at(p.slot_ids[b]);
    const std::int32_t len = slot_len_to_draft(slot, kMaxDraftLen);
    if (len == 0) continue;
    const std::int64_t first = std::int64_t{b} * p.width;
    const std::int32_t count = p.counts == nullptr ? p.width : std::min(p.counts[b], p.width);
    const bool misplaced =
        propose_draft(SerialTeam{}, slot->proposed_draft(), len, p.tokens + first,
                      p.parents == nullptr ? nullptr : p.parents + first,
                      p.survival == nullptr ? nullptr : p.survival + first, count, p.vocab_size);
    if (misplaced && p.exec.status != nullptr) p.exec.status[b] |= kStatusBadTree;
  }
}

void recent_tokens(const RecentTokensParams& p) {
  for (std::int32_t b = 0; b < p.num_requests; ++b) {
    TokenId* to = p.tokens + std::int64_t{b} * p.width;
    std::int32_t len = 0;
    if (p.slots.holds(p.slot_ids[b])) {
      Slot* slot = p.slots.at(p.slot_ids[b]);
      len = slot_len_to_draft(slot, p.max_drafts == nullptr ? kMaxDraftLen : p.max_drafts[b]);
      if (len < p.width) len = 0;
      if (len > 0) std::copy_n(slot->history() + len - p.width, p.width, to);
    }
    if (len == 0) std::fill_n(to, p.width, 0);
    p.lens[b] = len;
    if (p.room != nullptr) p.room[b] = len > 0 ? slot_draft_room(p.slots.at(p.slot_ids[b])) : 0;
  }
}

void keep_hidden(const KeepHiddenParams& p) {
  for (std::int32_t b = 0; b < p.num_requests; ++b) {
    const std::int32_t row = p.row(b);
    if (row < 0) continue;
    std::memcpy(p.kept + p.slot_ids[b] * p.row_bytes, p.hidden + row * p.hidden_stride,
                static_cast<std::size_t>(p.row_bytes));
  }
}

}  // namespace specdec::cpu
