// Which pages hold the K/V of which request, and how many tokens of them are committed.
//
// Host bookkeeping only: no K/V memory is touched here. Invariants, checked by check_integrity():
//   * free + held == total: every page is on the free list or in exactly one slot's run;
//   * a slot holds at least ceil(length / page_size) pages.
// reserve() is all or nothing. Pages are handed out last-freed first.
#pragma once

#include <cstdint>
#include <vector>

namespace specdec {

class PageTable {
 public:
  PageTable(int num_pages, int page_size, int num_slots, int max_pages_per_slot);

  // Makes room for `tokens` tokens in total. False, and nothing changed, when pages are short.
  bool reserve(int slot, std::int64_t tokens);
  // `length` tokens of the slot are final; they must fit into the reserved pages.
  void commit(int slot, std::int64_t length);
  // Returns the pages that the committed tokens do not need (rejected drafts leave no trace).
  void rewind(int slot);
  // Returns all pages of the slot.
  void release(int slot);

  std::int64_t length(int slot) const { return slots_[slot].length; }
  const std::vector<std::int32_t>& pages(int slot) const { return slots_[slot].pages; }
  int num_pages() const { return num_pages_; }
  int page_size() const { return page_size_; }
  int max_pages_per_slot() const { return max_pages_per_slot_; }
  int free_pages() const { return static_cast<int>(free_.size()); }
  std::int64_t pages_for(std::int64_t tokens) const {
    return (tokens + page_size_ - 1) / page_size_;
  }

  // Throws std::logic_error when an invariant does not hold. O(pages).
  void check_integrity() const;

 private:
  struct Slot {
    std::vector<std::int32_t> pages;
    std::int64_t length = 0;
  };
  int num_pages_, page_size_, max_pages_per_slot_;
  std::vector<std::int32_t> free_;
  std::vector<Slot> slots_;
};

}  // namespace specdec
