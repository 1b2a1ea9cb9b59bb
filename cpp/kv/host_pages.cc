#include "kv/host_pages.h"

#include <algorithm>

#include "base/check.h"

namespace specdec {

HostPages::HostPages(int num_pages, int num_slots) : num_pages_(num_pages), slots_(num_slots) {
  SPECDEC_REQUIRE(num_pages >= 0, "num_host_pages = ", num_pages, ": give 0 (none) or more");
  free_.reserve(num_pages);
  for (int page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

bool HostPages::keep(int slot, const std::vector<std::int32_t>& run, int first) {
  std::vector<std::int32_t>& kept = slots_[slot];
  SPECDEC_ENSURE(kept.empty(), "slot ", slot, " keeps ", kept.size(), " blocks already");
  const auto wanted = std::count_if(run.begin() + first, run.end(),
                                    [](std::int32_t page) { return page != kNoPage; });
  if (wanted > free_pages()) return false;
  kept.assign(run.size(), kNoPage);
  for (std::size_t block = first; block < run.size(); ++block) {
    if (run[block] == kNoPage) continue;
    kept[block] = free_.back();
    free_.pop_back();
  }
  return true;
}

void HostPages::drop(int slot) {
  for (const std::int32_t page : slots_[slot]) {
    if (page != kNoPage) free_.push_back(page);
  }
  slots_[slot].clear();
}

void HostPages::check_integrity() const {
  std::vector<std::int32_t> seen = free_;
  for (const auto& kept : slots_) {
    std::copy_if(kept.begin(), kept.end(), std::back_inserter(seen),
                 [](std::int32_t page) { return page != kNoPage; });
  }
  std::sort(seen.begin(), seen.end());
  for (std::size_t i = 0; i < seen.size(); ++i) {
    SPECDEC_ENSURE(seen[i] == static_cast<std::int32_t>(i), "page ", seen[i],
                   " of the host's pool of ", num_pages_, " is held twice, or not at all");
  }
  SPECDEC_ENSURE(static_cast<int>(seen.size()) == num_pages_, "the host's pool has ", num_pages_,
                 " pages, ", seen.size(), " are known");
}

}  // namespace specdec
