#include "kv/page_table.h"

#include <algorithm>

#include "base/check.h"
#include "base/pages.h"

namespace specdec {

PageTable::PageTable(int num_pages, int page_size, int num_slots, int max_pages_per_slot,
                     bool enable_block_reuse, int hash_bits)
    : num_pages_(num_pages), page_size_(page_size), max_pages_per_slot_(max_pages_per_slot) {
  SPECDEC_REQUIRE(num_pages >= 1, "num_pages = ", num_pages, ": at least 1");
  SPECDEC_REQUIRE(is_page_size(page_size), "tokens_per_block = ", page_size,
                  ": a power of two from 1 to ", kMaxPageSize);
  slots_.resize(num_slots);
  for (Slot& slot : slots_) slot.pages.reserve(max_pages_per_slot);
  free_.reserve(num_pages);
  for (int page = num_pages - 1; page >= 0; --page) free_.push_back(page);
  holders_.assign(num_pages, 0);
  if (enable_block_reuse) index_ = std::make_unique<PrefixIndex>(num_pages, page_size, hash_bits);
}

std::int32_t PageTable::take_page() {
  if (free_.empty()) {
    const std::int32_t page = index_->longest_unused();
    index_->erase(page);
    ++reuse_stats_.evicted_pages;
    return page;
  }
  const std::int32_t page = free_.back();
  free_.pop_back();
  return page;
}

void PageTable::hold(std::int32_t published) {
  if (holders_[published]++ == 0) index_->remove_unused(published);
}

void PageTable::let_go(std::int32_t page) {
  if (--holders_[page] > 0) return;
  if (index_ && index_->contains(page)) {
    index_->add_unused(page);
  } else {
    free_.push_back(page);
  }
}

bool PageTable::reserve(int slot, std::int64_t tokens) {
  Slot& s = slots_[slot];
  const std::int64_t missing = pages_for(tokens) - static_cast<std::int64_t>(s.pages.size());
  if (missing <= 0) return true;
  SPECDEC_ENSURE(pages_for(tokens) <= max_pages_per_slot_, "slot ", slot, " wants ",
                 pages_for(tokens), " pages, its table has ", max_pages_per_slot_);
  if (missing > free_pages()) return false;
  for (std::int64_t i = 0; i < missing; ++i) {
    const std::int32_t page = take_page();
    holders_[page] = 1;
    s.pages.push_back(page);
  }
  return true;
}

void PageTable::commit(int slot, std::int64_t length) {
  Slot& s = slots_[slot];
  SPECDEC_ENSURE(length >= 0 && pages_for(length) <= static_cast<std::int64_t>(s.pages.size()),
                 "slot ", slot, " commits ", length, " tokens in ", s.pages.size(), " pages");
  SPECDEC_ENSURE(length >= shared_tokens(slot), "slot ", slot, " commits ", length, " tokens, ",
                 shared_tokens(slot), " are published");
  s.length = length;
}

void PageTable::rewind(int slot) {
  Slot& s = slots_[slot];
  const std::size_t needed = static_cast<std::size_t>(pages_for(s.length));
  // Last page first: in the index's list a page comes before its parent.
  while (s.pages.size() > needed) {
    const std::int32_t page = s.pages.back();
    s.pages.pop_back();
    let_go(page);
  }
}

void PageTable::release(int slot) {
  Slot& s = slots_[slot];
  s.length = 0;
  s.shared = 0;
  rewind(slot);
  if (s.root != PrefixIndex::kNone) index_->release_root(s.root);
  s.root = PrefixIndex::kNone;
}

PageTable::Match PageTable::match(const std::string& salt, const TokenId* tokens,
                                  std::int64_t count) const {
  Match found;
  if (!index_) return found;
  PrefixIndex::Node node = index_->find_root(salt);
  for (std::int64_t block = 0; node != PrefixIndex::kNone && block < count / page_size_; ++block) {
    node = index_->find(node, tokens + block * page_size_);
    if (node == PrefixIndex::kNone) break;
    ++found.pages;
    found.unused += holders_[node] == 0;
  }
  return found;
}

void PageTable::open(int slot, const std::string& salt) {
  Slot& s = slots_[slot];
  SPECDEC_ENSURE(s.pages.empty() && s.root == PrefixIndex::kNone, "slot ", slot, " is in use");
  if (index_) s.root = index_->hold_root(salt);
}

int PageTable::attach(int slot, const TokenId* tokens, std::int64_t count) {
  Slot& s = slots_[slot];
  if (s.root == PrefixIndex::kNone) return 0;
  SPECDEC_ENSURE(static_cast<int>(s.pages.size()) == s.shared, "slot ", slot, " holds ",
                 s.pages.size() - s.shared, " pages of its own");
  const std::int64_t blocks = std::min<std::int64_t>(count / page_size_, max_pages_per_slot_);
  const int before = s.shared;
  while (s.shared < blocks) {
    const PrefixIndex::Node page = index_->find(
        node_before(s, s.shared), tokens + static_cast<std::ptrdiff_t>(s.shared) * page_size_);
    if (page == PrefixIndex::kNone) break;
    hold(page);
    s.pages.push_back(page);
    ++s.shared;
  }
  s.length = shared_tokens(slot);
  reuse_stats_.attached_pages += s.shared - before;
  return s.shared - before;
}

void PageTable::publish(int slot, const TokenId* tokens, std::int64_t count, bool swap) {
  Slot& s = slots_[slot];
  if (s.root == PrefixIndex::kNone) return;
  SPECDEC_ENSURE(count <= s.length, "slot ", slot, " publishes ", count, " tokens, ", s.length,
                 " are committed");
  for (const int blocks = static_cast<int>(count / page_size_); s.shared < blocks; ++s.shared) {
    const PrefixIndex::Node parent = node_before(s, s.shared);
    const TokenId* block = tokens + static_cast<std::ptrdiff_t>(s.shared) * page_size_;
    const PrefixIndex::Node published = index_->find(parent, block);
    std::int32_t& own = s.pages[s.shared];
    if (published == PrefixIndex::kNone) {
      index_->insert(parent, block, own);
      ++reuse_stats_.published_pages;
    } else if (!swap) {
      return;
    } else {
      // Somebody else was first. Hanging the slot's next pages under a page that it does not hold
      // would pin that one; holding it instead of our copy frees a page.
      hold(published);
      let_go(own);
      own = published;
      ++reuse_stats_.deduplicated_pages;
    }
  }
}

int PageTable::drop_unused() {
  int dropped = 0;
  for (; index_ && index_->num_unused() > 0; ++dropped) {
    const std::int32_t page = index_->longest_unused();
    index_->erase(page);
    free_.push_back(page);
  }
  return dropped;
}

void PageTable::check_integrity() const {
  std::vector<std::int32_t> held(num_pages_, 0);
  auto in_pool = [&](std::int32_t page, const char* owner, int slot) {
    SPECDEC_ENSURE(page >= 0 && page < num_pages_, "page ", page, " of ", owner, " ", slot,
                   " is outside the pool of ", num_pages_);
  };
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& s = slots_[i];
    const int slot = static_cast<int>(i);
    for (int block = 0; block < static_cast<int>(s.pages.size()); ++block) {
      const std::int32_t page = s.pages[block];
      in_pool(page, "slot", slot);
      ++held[page];
      const bool published = index_ && index_->contains(page);
      SPECDEC_ENSURE(published == (block < s.shared), "page ", page, ", block ", block, " of slot ",
                     slot, ", is ", published ? "" : "not ", "published, the slot shares ",
                     s.shared);
      SPECDEC_ENSURE(published || held[page] == 1, "page ", page, " is held twice, second by slot ",
                     slot);
      SPECDEC_ENSURE(!published || index_->parent(page) == node_before(s, block), "page ", page,
                     " is not the child of the page before it in slot ", slot);
    }
    SPECDEC_ENSURE(pages_for(s.length) <= static_cast<std::int64_t>(s.pages.size()), "slot ", slot,
                   " has ", s.length, " tokens in ", s.pages.size(), " pages");
    SPECDEC_ENSURE(shared_tokens(slot) <= s.length, "slot ", slot, " shares ", shared_tokens(slot),
                   " tokens of ", s.length);
  }
  std::vector<std::uint8_t> is_free(num_pages_, 0);
  for (std::int32_t page : free_) {
    in_pool(page, "free list", -1);
    SPECDEC_ENSURE(!is_free[page] && held[page] == 0 && !(index_ && index_->contains(page)),
                   "page ", page, " is held twice, second by free list -1");
    is_free[page] = 1;
  }
  int in_use = 0;
  for (int page = 0; page < num_pages_; ++page) {
    SPECDEC_ENSURE(holders_[page] == held[page] || (is_free[page] && held[page] == 0), "page ",
                   page, " counts ", holders_[page], " holders, has ", held[page]);
    in_use += held[page] > 0;
  }
  SPECDEC_ENSURE(in_use + free_pages() == num_pages_, "free ", free_.size(), " + cached ",
                 cached_pages(), " + held ", in_use, " != total ", num_pages_);
  if (index_) index_->check_integrity();
}

}  // namespace specdec
