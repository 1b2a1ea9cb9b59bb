#include "kv/page_parts.h"

#include <utility>

#include "base/check.h"

namespace specdec {

PageParts::PageParts(int num_pages, int most, bool numbered, bool keeps_idle, Gone gone)
    : most_(most),
      numbered_(numbered),
      keeps_idle_(keeps_idle),
      gone_(std::move(gone)),
      number_(num_pages, kNone),
      seen_(num_pages, 0),
      next_(num_pages + 1, kNone),
      previous_(num_pages + 1, kNone) {
  SPECDEC_REQUIRE(most >= 1 && most <= num_pages, "a narrow window's pages = ", most,
                  ": give 1 to num_pages = ", num_pages);
  for (int number = most - 1; numbered && number >= 0; --number) free_.push_back(number);
  next_[num_pages] = previous_[num_pages] = num_pages;
}

void PageParts::unlist(std::int32_t page) {
  if (next_[page] == kNone) return;
  next_[previous_[page]] = next_[page];
  previous_[next_[page]] = previous_[page];
  next_[page] = previous_[page] = kNone;
}

void PageParts::lose(std::int32_t page) {
  unlist(page);
  if (numbered_) free_.push_back(number_[page]);
  number_[page] = kNone;
  --count_;
  if (gone_) gone_(page);
}

void PageParts::see(std::int32_t page) {
  if (!has(page)) {
    const auto head = static_cast<std::int32_t>(number_.size());
    while (count_ >= most_ && next_[head] != head) lose(next_[head]);
    SPECDEC_ENSURE(!numbered_ || !free_.empty(), "page ", page, " needs a part for a narrow window",
                   ", all ", most_, " are seen");
    number_[page] = page;
    if (numbered_) {
      number_[page] = free_.back();
      free_.pop_back();
    }
    ++count_;
  }
  unlist(page);
  ++seen_[page];
}

void PageParts::leave(std::int32_t page) {
  SPECDEC_ENSURE(seen_[page] > 0, "page ", page, "'s part was left, and nobody saw it");
  if (--seen_[page] > 0) return;
  if (!keeps_idle_) return lose(page);
  const auto head = static_cast<std::int32_t>(number_.size());
  next_[page] = head;
  previous_[page] = previous_[head];
  next_[previous_[head]] = page;
  previous_[head] = page;
}

void PageParts::drop(std::int32_t page) {
  SPECDEC_ENSURE(seen_[page] == 0, "page ", page, " is free, ", seen_[page], " slots see its part");
  if (has(page)) lose(page);
}

void PageParts::check_integrity(const std::vector<std::int32_t>& seen) const {
  std::vector<std::uint8_t> taken(number_.size(), 0);
  int there = 0, idle = 0;
  for (std::size_t page = 0; page < number_.size(); ++page) {
    SPECDEC_ENSURE(seen[page] == seen_[page], "page ", page, "'s part is seen by ", seen[page],
                   " slots, counted ", seen_[page]);
    SPECDEC_ENSURE(number_[page] != kNone || seen_[page] == 0, "page ", page,
                   "'s part is seen and not there");
    SPECDEC_ENSURE((next_[page] != kNone) == (number_[page] != kNone && seen_[page] == 0), "page ",
                   page, "'s part is wrongly idle, or wrongly not");
    if (number_[page] == kNone) continue;
    ++there;
    SPECDEC_ENSURE(!taken[number_[page]]++, "part ", number_[page], " is of two pages");
  }
  for (std::int32_t page = next_.back(); page + 1u < next_.size(); page = next_[page]) ++idle;
  SPECDEC_ENSURE(there == count_ && idle <= there, "parts: ", there, ", counted ", count_, ", ",
                 idle, " idle");
  SPECDEC_ENSURE(!numbered_ || static_cast<int>(free_.size()) + count_ == most_, "parts: ", count_,
                 " of ", most_, ", free ", free_.size());
}

}  // namespace specdec
