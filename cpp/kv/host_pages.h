// The host's pool of pages: copies of K/V whose slots gave their own pages back.
//
// Bookkeeping only, as PageTable: which page of the pool holds which block of which slot. Copies
// are ordered (PageOrder) when a step is planned, and made in that order before the step's other
// work. So a page is free again as soon as the copy out of it was ordered: whoever gets it next is
// copied to later.
#pragma once

#include <cstdint>
#include <vector>

#include "base/types.h"

namespace specdec {

// What is to be done with a page before a step's rows are written: to copy it, in all layers, and
// everything else that goes by the page's number (the pages of a draft model), between the pool
// that steps read and the host's; or to give its memory in the layers of a narrow window back.
struct PageOrder {
  RequestId request = 0;
  std::int32_t page = 0, host_page = 0;
  bool to_host = false;
  int left = -1;  // 0 or more: the narrow window whose layers have left the page; no copy
  // A copy of a pool whose narrow windows have parts with numbers: those, by window (PageParts).
  std::vector<std::int32_t> parts = {};
};

class HostPages {
 public:
  static constexpr std::int32_t kNoPage = -1;

  HostPages(int num_pages, int num_slots);

  // A page for each block from `first` on that has one in `run` (PageTable::pages). False, and
  // nothing changed, when pages are short. The slot must keep nothing.
  bool keep(int slot, const std::vector<std::int32_t>& run, int first);
  // By block; kNoPage: the block was not kept.
  const std::vector<std::int32_t>& pages(int slot) const { return slots_[slot]; }
  // Returns all pages of the slot.
  void drop(int slot);

  int num_pages() const { return num_pages_; }
  int free_pages() const { return static_cast<int>(free_.size()); }

  // Throws std::logic_error unless every page is free or one slot's. O(pages).
  void check_integrity() const;

 private:
  int num_pages_;
  std::vector<std::int32_t> free_;
  std::vector<std::vector<std::int32_t>> slots_;
};

}  // namespace specdec
