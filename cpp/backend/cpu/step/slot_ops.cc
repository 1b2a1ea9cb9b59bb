// Slots in host memory: the algorithms' text with a team of one.
#include <algorithm>

#include "algo/slot.h"
#include "backend/cpu/step/step_ops.h"

namespace specdec::cpu {

void draft_step(const DraftStepParams& p) {
  std::int32_t rows = 0;
  p.cu_rows[0] = 0;
  for (std::int32_t b = 0; b < p.num_requests; ++b) {
    p.kv_len[b] = 0;
    if (p.slots.holds(p.slot_ids[b])) {
      Slot* slot = p.slots.at(p.slot_ids[b]);
      DraftTree* tree = &slot->tree;
      slot_draft(SerialTeam{}, slot, p.share(b), tree);
      p.kv_len[b] = std::max(slot->len - 1, 0);
      if (rows + tree->size <= p.num_rows) {
        std::copy_n(tree->tokens, tree->size, p.tokens + rows);
        std::copy_n(tree->parents, tree->size, p.parents + rows);
        rows += tree->size;
      } else if (p.exec.status != nullptr) {
        p.exec.status[b] |= kStatusBadLength;
      }
    }
    p.cu_rows[b + 1] = rows;
  }
  std::fill(p.tokens + rows, p.tokens + p.num_rows, 0);
  std::fill(p.parents + rows, p.parents + p.num_rows, -1);
}

void commit_step(const CommitStepParams& p) {
  for (std::int32_t b = 0; b < p.num_requests; ++b) {
    std::int32_t* path = p.path + static_cast<std::int64_t>(b) * kMaxStepTokens;
    const std::int32_t first = p.cu_logits[b];
    const std::int64_t rows = std::int64_t{p.cu_logits[b + 1]} - first;
    if (!p.slots.holds(p.slot_ids[b])) {
      p.results[b] = SlotResult{};
      p.results[b].stop_token = kNoStopToken;
      p.path_len[b] = 0;
      continue;
    }
    Slot* slot = p.slots.at(p.slot_ids[b]);
    const std::int32_t expected = slot_logit_rows(slot, slot->tree.size);
    if (rows == 0 || rows != expected || first < 0 || first > p.num_sampled - rows) {
      slot_no_result(SerialTeam{}, slot, p.results + b, p.path_len + b);
      if (rows != 0 && p.exec.status != nullptr) p.exec.status[b] |= kStatusBadLength;
      continue;
    }
    const SerialTeam team;
    AcceptResult accepted;
    slot_begin_tree(team, slot, &slot->tree);
    if (p.accepted.given()) {
      p.accepted.load(team, b, &accepted);
      if (!is_accepted_path(team, &slot->tree, &accepted)) {
        slot_no_result(team, slot, p.results + b, p.path_len + b);
        if (p.exec.status != nullptr) p.exec.status[b] |= kStatusBadTree;
        continue;
      }
    } else {
      slot_accept(team, &slot->tree, p.sampled + first, &accepted);
    }
    slot_commit(team, slot, &slot->tree, p.sampled + first, &accepted, p.results + b, path,
                p.path_len + b);
  }
}

}  // namespace specdec::cpu
