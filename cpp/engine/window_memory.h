// Memory of K/V that layers with narrow windows leave behind, while others keep theirs.
//
// All layers share one table of pages, so a page is freed when the layer with the widest window is
// past it; where a layer sees everything, not before the text ends. A layer with a narrower window
// needs its part of that page no longer. Where pages lie in memory that the operating system maps
// when it is written (base/zeroed_memory.h), that part goes back to it: the page keeps its number,
// and takes memory again when the next text writes it.
//
// Layers of one window are a group; PageTable::narrow() says which group has left which page.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/step_view.h"

namespace specdec {

class WindowMemory {
 public:
  // windows  by layer: tokens, 0 for a layer whose memory stays with the page
  // A layer's part of a page must be whole pages of the operating system, at their bounds:
  // std::invalid_argument.
  WindowMemory(const KvCacheView& cache, const std::vector<int>& windows);

  int num_groups() const { return static_cast<int>(layers_.size()); }
  std::int64_t num_pages() const { return cache_.num_pages; }
  // The layers of a group read this page no more: it is zeros for them.
  void leave(int group, std::int32_t page) const;

 private:
  KvCacheView cache_;
  std::vector<std::vector<int>> layers_;  // of each group, windows ascending
  std::int64_t bytes_ = 0;                // of K, and of V, of a layer in a page
};

}  // namespace specdec
