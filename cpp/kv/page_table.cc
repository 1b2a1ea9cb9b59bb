#include "kv/page_table.h"

#include "base/check.h"

namespace specdec {

PageTable::PageTable(int num_pages, int page_size, int num_slots, int max_pages_per_slot)
    : num_pages_(num_pages), page_size_(page_size), max_pages_per_slot_(max_pages_per_slot) {
  SPECDEC_REQUIRE(num_pages >= 1, "num_pages = ", num_pages, ": at least 1");
  SPECDEC_REQUIRE(page_size >= 1 && page_size <= 128 && (page_size & (page_size - 1)) == 0,
                  "tokens_per_block = ", page_size, ": a power of two from 1 to 128");
  slots_.resize(num_slots);
  for (Slot& slot : slots_) slot.pages.reserve(max_pages_per_slot);
  free_.reserve(num_pages);
  for (int page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

bool PageTable::reserve(int slot, std::int64_t tokens) {
  Slot& s = slots_[slot];
  const std::int64_t missing = pages_for(tokens) - static_cast<std::int64_t>(s.pages.size());
  if (missing <= 0) return true;
  SPECDEC_ENSURE(pages_for(tokens) <= max_pages_per_slot_, "slot ", slot, " wants ",
                 pages_for(tokens), " pages, its table has ", max_pages_per_slot_);
  if (missing > static_cast<std::int64_t>(free_.size())) return false;
  for (std::int64_t i = 0; i < missing; ++i) {
    s.pages.push_back(free_.back());
    free_.pop_back();
  }
  return true;
}

void PageTable::commit(int slot, std::int64_t length) {
  Slot& s = slots_[slot];
  SPECDEC_ENSURE(length >= 0 && pages_for(length) <= static_cast<std::int64_t>(s.pages.size()),
                 "slot ", slot, " commits ", length, " tokens in ", s.pages.size(), " pages");
  s.length = length;
}

void PageTable::rewind(int slot) {
  Slot& s = slots_[slot];
  const std::size_t needed = static_cast<std::size_t>(pages_for(s.length));
  while (s.pages.size() > needed) {
    free_.push_back(s.pages.back());
    s.pages.pop_back();
  }
}

void PageTable::release(int slot) {
  slots_[slot].length = 0;
  rewind(slot);
}

void PageTable::check_integrity() const {
  std::vector<std::uint8_t> seen(num_pages_, 0);
  auto claim = [&](std::int32_t page, const char* owner, int slot) {
    SPECDEC_ENSURE(page >= 0 && page < num_pages_, "page ", page, " of ", owner, " ", slot,
                   " is outside the pool of ", num_pages_);
    SPECDEC_ENSURE(!seen[page], "page ", page, " is held twice, second by ", owner, " ", slot);
    seen[page] = 1;
  };
  std::size_t held = 0;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    held += slots_[i].pages.size();
    for (std::int32_t page : slots_[i].pages) claim(page, "slot", static_cast<int>(i));
    SPECDEC_ENSURE(pages_for(slots_[i].length) <= static_cast<std::int64_t>(slots_[i].pages.size()),
                   "slot ", i, " has ", slots_[i].length, " tokens in ", slots_[i].pages.size(),
                   " pages");
  }
  for (std::int32_t page : free_) claim(page, "free list", -1);
  SPECDEC_ENSURE(held + free_.size() == static_cast<std::size_t>(num_pages_), "free ", free_.size(),
                 " + held ", held, " != total ", num_pages_);
}

}  // namespace specdec
