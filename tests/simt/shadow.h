// What the checker remembers of every byte: who touched it last.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

namespace simt {

// An access: block (18 bits), rank (12), the clock of that rank, never 0 (19), kind (2), place
// (13).
using Access = uint64_t;
constexpr unsigned kMaxBlocks = 1 << 18, kMaxClock = 1 << 19, kMaxPlaces = 1 << 13;
struct Cell {  // of one byte: its last write and the unordered reads since
  Access write, read[3];
  bool operator==(const Cell&) const = default;
};
constexpr uintptr_t kPage = 4096;
struct Shadow {
  std::unordered_map<uintptr_t, std::unique_ptr<Cell[]>> pages;
  uintptr_t last = 0;
  Cell* cells = nullptr;
  Cell& at(uintptr_t a) {
    if (a / kPage != last) {
      auto& p = pages[last = a / kPage];
      if (!p) p.reset(new Cell[kPage]());
      cells = p.get();
    }
    return cells[a % kPage];
  }
  void clear() { pages.clear(), last = 0; }
};

}  // namespace simt
