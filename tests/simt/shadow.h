// What the checker remembers of every byte: who touched it last.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

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
  std::unordered_map<uintptr_t, std::vector<char>> content;  // after remember(), by page
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
  void clear() { pages.clear(), content.clear(), last = 0; }
  // Keeps what the written pages hold now: memory that the host changes later is no kernel's work.
  void remember() {
    for (const auto& [page, cells] : pages) {
      const auto written = [](const Cell& c) { return c.write != 0; };
      if (std::none_of(&cells[0], &cells[kPage], written)) continue;
      const char* from = reinterpret_cast<const char*>(page * kPage);
      content[page].assign(from, from + kPage);
    }
  }
  bool changed(uintptr_t a, unsigned bytes) const {
    for (uintptr_t end = a + bytes; a < end; a++) {
      const auto kept = content.find(a / kPage);
      if (kept != content.end() && kept->second[a % kPage] != *reinterpret_cast<const char*>(a))
        return true;
    }
    return false;
  }
  // Was a byte of these written, or for a write accessed at all?
  bool touched(uintptr_t a, unsigned bytes, bool write) const {
    for (uintptr_t end = a + bytes; a < end; a++) {
      const auto page = pages.find(a / kPage);
      if (page == pages.end()) continue;
      const Cell& c = page->second[a % kPage];
      if (c.write || (write && c.read[0])) return true;
    }
    return false;
  }
};

}  // namespace simt
