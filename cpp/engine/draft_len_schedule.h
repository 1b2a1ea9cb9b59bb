// Draft lengths by batch size, as TensorRT-LLM's draft_len_schedule: upper bounds. {4:4, 8:2}
// means 4 drafts for 1..4 running requests, 2 for 5..8, none above.
#pragma once

#include <utility>
#include <vector>

namespace specdec {

// (running requests, drafts), ascending; empty: no limit.
using DraftLenSchedule = std::vector<std::pair<int, int>>;

inline int draft_len_limit_for(const DraftLenSchedule& schedule, int running, int max_draft_len) {
  if (schedule.empty()) return max_draft_len;
  for (const auto& [batch, length] : schedule) {
    if (running <= batch) return length;
  }
  return 0;
}

}  // namespace specdec
