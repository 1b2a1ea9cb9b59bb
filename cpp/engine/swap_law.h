// What is cheaper for a request that has to give its pages back: to copy them to the host and back,
// or to read its text again. The one text of this law.
#pragma once

#include <cstdint>

#include "engine/step_cost.h"

namespace specdec {

// The way between the pages that steps read and the host's pool.
struct HostLink {
  double bytes_per_second = 0.0;  // 0: not known
  std::int64_t page_bytes = 0;    // of everything that goes by a page's number
};

// Are `pages` pages copied out and back in less time than tokens start, ..., end - 1 are read in
// passes of `chunk` rows? Where the time of either is not known: who made room for copies wants
// them.
inline bool swapping_pays(const StepCost& cost, const HostLink& link, std::int64_t pages,
                          std::int64_t start, std::int64_t end, int chunk) {
  if (!cost.known() || link.bytes_per_second <= 0.0) return true;
  const double bytes = 2.0 * static_cast<double>(pages) * static_cast<double>(link.page_bytes);
  return bytes / link.bytes_per_second <=
         cost.read(static_cast<double>(start), static_cast<double>(end), chunk);
}

}  // namespace specdec
