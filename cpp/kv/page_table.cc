#include "kv/page_table.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/pages.h"

namespace specdec {

PageTable::PageTable(int num_pages, int page_size, int num_slots, int max_pages_per_slot,
                     bool enable_block_reuse, int hash_bits, AttentionSpan span)
    : num_pages_(num_pages),
      page_size_(page_size),
      max_pages_per_slot_(max_pages_per_slot),
      span_(span.window > 0 ? span : AttentionSpan{}) {
  SPECDEC_REQUIRE(num_pages >= 1, "num_pages = ", num_pages, ": at least 1");
  SPECDEC_REQUIRE(is_page_size(page_size), "tokens_per_block = ", page_size,
                  ": a power of two from 1 to ", kMaxPageSize);
  SPECDEC_REQUIRE(span.window >= 0, "attention_window = ", span.window, ": give 0 (none) or more");
  SPECDEC_REQUIRE(span.sink_tokens >= 0, "sink_tokens = ", span.sink_tokens, ": give 0 or more");
  slots_.resize(num_slots);
  for (Slot& slot : slots_) slot.pages.reserve(max_pages_per_slot);
  free_.reserve(num_pages);
  for (int page = num_pages - 1; page >= 0; --page) free_.push_back(page);
  holders_.assign(num_pages, 0);
  if (enable_block_reuse) index_ = std::make_unique<PrefixIndex>(num_pages, page_size, hash_bits);
}

std::int32_t PageTable::take_page() {
  if (free_.empty()) {
    ++reuse_stats_.evicted_pages;
    give_page(index_->take_page(index_->longest_unused()));
  }
  const std::int32_t page = free_.back();
  free_.pop_back();
  return page;
}

void PageTable::hold(std::int32_t published) {
  if (holders_[published]++ == 0) index_->remove_unused(index_->node_of(published));
}

void PageTable::let_go(std::int32_t page) {
  if (--holders_[page] > 0) return;
  if (index_ && index_->contains(page)) {
    index_->add_unused(index_->node_of(page));
  } else {
    give_page(page);
  }
}

// A page that nobody holds and that is not published, or no more.
void PageTable::give_page(std::int32_t page) {
  for (Narrow& narrow : narrow_) narrow.parts.drop(page);
  free_.push_back(page);
}

void PageTable::set_tip(Slot& slot, PrefixIndex::Node node) {
  index_->hold(node);
  index_->release(slot.tip);
  slot.tip = node;
}

// Blocks without a page are bounded by what is still to be read behind them; texts of which little
// is left give way when there are many.
void PageTable::bound_index() {
  const std::size_t most = 2 * static_cast<std::size_t>(num_pages_) +
                           slots_.size() * static_cast<std::size_t>(max_pages_per_slot_);
  while (index_->num_nodes() > most && index_->num_unused() > 0) {
    give_page(index_->take_page(index_->longest_unused()));
    ++reuse_stats_.evicted_pages;
  }
}

bool PageTable::reserve(int slot, std::int64_t tokens) {
  Slot& s = slots_[slot];
  const std::int64_t missing = this->missing(slot, tokens);
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
    leave_block(s, static_cast<int>(s.pages.size()) - 1);
    s.pages.pop_back();
    if (page != kNoPage) let_go(page);
  }
}

void PageTable::release(int slot) {
  Slot& s = slots_[slot];
  s.length = 0;
  s.shared = 0;
  rewind(slot);
  s.kept_from = 0;
  for (View& view : s.views) view = {};
  if (s.root != PrefixIndex::kNone) {
    index_->release(s.tip);
    index_->release_root(s.root);
  }
  s.root = s.tip = PrefixIndex::kNone;
}

bool PageTable::restore(int slot, std::int64_t length, int kept_from, const Seen& seen) {
  Slot& s = slots_[slot];
  const int attached = static_cast<int>(s.pages.size());
  const int blocks = static_cast<int>(pages_for(length));
  SPECDEC_ENSURE(attached == s.shared && (attached == 0 || kept_from <= sink_blocks()), "slot ",
                 slot, " holds ", attached, " pages, ", s.shared,
                 " of them published; only these may be there, and no block behind a window");
  SPECDEC_ENSURE(attached <= blocks && kept_from <= blocks && blocks <= max_pages_per_slot_,
                 "slot ", slot, " is to get ", blocks, " blocks, those from ", kept_from,
                 " on with a page; it has ", attached, ", its table ", max_pages_per_slot_);
  const auto gone = [&](int block) { return block >= sink_blocks() && block < kept_from; };
  int missing = 0;
  for (int block = attached; block < blocks; ++block) missing += !gone(block);
  if (missing > free_pages()) return false;
  for (int block = attached; block < blocks; ++block) {
    s.pages.push_back(gone(block) ? kNoPage : take_page());
    if (gone(block)) continue;
    holders_[s.pages.back()] = 1;
    for (std::size_t i = 0; i < seen.size(); ++i) {
      const bool was_seen = static_cast<std::size_t>(block) < seen[i].size() && seen[i][block];
      if (was_seen) see(s, static_cast<int>(i), block);
    }
  }
  s.kept_from = std::max(s.kept_from, kept_from);
  s.length = length;
  return true;
}

int PageTable::held_by_others(int slot) const {
  const Slot& s = slots_[slot];
  if (span_.window > 0) return 0;
  int blocks = 0;
  while (blocks < s.shared && holders_[s.pages[blocks]] > 1) ++blocks;
  return blocks;
}

// Fills path_ with the nodes of the blocks that `tokens` start with. How many of them can be taken
// over: the row behind them sees pages of these alone.
int PageTable::walk(PrefixIndex::Node root, const TokenId* tokens, std::int64_t count) const {
  path_.clear();
  runs_.assign(narrow_.size(), 0);
  PrefixIndex::Node node = root;
  int best = 0, run = 0;  // run: blocks up to here that have their page
  for (std::int64_t block = 0; node != PrefixIndex::kNone && block < count / page_size_; ++block) {
    node = index_->find(node, tokens + block * page_size_);
    if (node == PrefixIndex::kNone) break;
    const bool there = index_->page(node) != PrefixIndex::kNone;
    if (!there && block < std::max(sink_blocks(), span_.window == 0 ? max_pages_per_slot_ : 0)) {
      break;
    }
    bool sinks_there = true;
    for (std::size_t i = 0; i < narrow_.size(); ++i) {
      const bool part = there && narrow_[i].parts.has(index_->page(node));
      runs_[i] = part ? runs_[i] + 1 : 0;
      sinks_there &= part || block >= pages_for(narrow_[i].span.sink_tokens);
    }
    if (!sinks_there) break;
    path_.push_back(node);
    run = there ? run + 1 : 0;
    const int blocks = static_cast<int>(block) + 1;
    const std::int64_t next = std::int64_t{blocks} * page_size_;
    bool all_there = run >= blocks - first_seen(next);
    for (std::size_t i = 0; i < narrow_.size(); ++i) {
      all_there &= runs_[i] >= blocks - first_seen(narrow_[i].span, next);
    }
    if (all_there) best = blocks;
  }
  return best;
}

PageTable::Match PageTable::match(const std::string& salt, const TokenId* tokens,
                                  std::int64_t count) const {
  Match found;
  if (!index_) return found;
  found.blocks = walk(index_->find_root(salt), tokens, count);
  const int first = first_seen(std::int64_t{found.blocks} * page_size_);
  for (int block = 0; block < found.blocks; ++block) {
    if (block >= sink_blocks() && block < first) continue;
    ++found.pages;
    found.unused += holders_[index_->page(path_[block])] == 0;
  }
  return found;
}

void PageTable::open(int slot, const std::string& salt) {
  Slot& s = slots_[slot];
  SPECDEC_ENSURE(s.pages.empty() && s.root == PrefixIndex::kNone, "slot ", slot, " is in use");
  if (index_) s.root = s.tip = index_->hold_root(salt);
}

int PageTable::attach(int slot, const TokenId* tokens, std::int64_t count) {
  Slot& s = slots_[slot];
  if (s.root == PrefixIndex::kNone) return 0;
  SPECDEC_ENSURE(static_cast<int>(s.pages.size()) == s.shared, "slot ", slot, " holds ",
                 s.pages.size() - s.shared, " pages of its own");
  const int before = s.shared;
  const int blocks =
      walk(s.root, tokens, std::min(count, std::int64_t{max_pages_per_slot_} * page_size_));
  if (blocks <= before) return 0;
  const int first = first_seen(std::int64_t{blocks} * page_size_);
  s.pages.resize(static_cast<std::size_t>(blocks), kNoPage);
  for (int block = 0; block < blocks; ++block) {
    if ((block >= sink_blocks() && block < first) || s.pages[block] != kNoPage) continue;
    s.pages[block] = index_->page(path_[block]);
    hold(s.pages[block]);
    ++reuse_stats_.attached_pages;
  }
  s.shared = blocks;
  set_tip(s, path_[blocks - 1]);
  s.length = shared_tokens(slot);
  for (int i = 0; i < num_narrow(); ++i) {
    for (int block = 0; block < blocks; ++block) {
      if (is_seen(narrow_[i].span, s.length, block)) see(s, i, block);
    }
  }
  leave_behind(s, s.length);
  give_back(s, first);
  return blocks - before;
}

void PageTable::publish(int slot, const TokenId* tokens, std::int64_t count, bool swap) {
  Slot& s = slots_[slot];
  if (s.root == PrefixIndex::kNone) return;
  SPECDEC_ENSURE(count <= s.length, "slot ", slot, " publishes ", count, " tokens, ", s.length,
                 " are committed");
  for (const int blocks = static_cast<int>(count / page_size_); s.shared < blocks; ++s.shared) {
    const TokenId* block = tokens + static_cast<std::ptrdiff_t>(s.shared) * page_size_;
    const std::int32_t own = s.pages[s.shared];
    PrefixIndex::Node node = index_->find(s.tip, block);
    const bool known = node != PrefixIndex::kNone;
    const std::int32_t published = known ? index_->page(node) : PrefixIndex::kNone;
    if (!known) {
      node = index_->insert(s.tip, block, own);
      reuse_stats_.published_pages += own != kNoPage;
    } else if (own == kNoPage) {
      // Its page was given back; whether another slot's is there does not matter.
    } else if (published == PrefixIndex::kNone) {
      index_->give_page(node, own);
      ++reuse_stats_.published_pages;
    } else if (!has_what_is_seen(s, s.shared, published) && holders_[published] == 0) {
      // Its layers with narrow windows have left it: ours takes its place.
      index_->hold(node);
      give_page(index_->take_page(node));
      index_->give_page(node, own);
      index_->release(node);
      ++reuse_stats_.published_pages;
    } else if (!swap || !has_what_is_seen(s, s.shared, published)) {
      break;
    } else {
      // Somebody else was first. Hanging the slot's next pages under a page that it does not hold
      // would pin that one; holding it instead of our copy frees a page.
      swap_page(s, s.shared, published);
      ++reuse_stats_.deduplicated_pages;
    }
    set_tip(s, node);
  }
  bound_index();
}

int PageTable::drop_unused() {
  int dropped = 0;
  for (; index_ && index_->num_unused() > 0; ++dropped) {
    give_page(index_->take_page(index_->longest_unused()));
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
    SPECDEC_ENSURE(s.kept_from <= static_cast<int>(s.pages.size()), "slot ", slot,
                   " keeps blocks from ", s.kept_from, " on, has ", s.pages.size());
    PrefixIndex::Node node = s.tip;
    for (int block = static_cast<int>(s.pages.size()) - 1; block >= 0; --block) {
      const std::int32_t page = s.pages[block];
      const bool gone = block >= sink_blocks() && block < s.kept_from;
      SPECDEC_ENSURE((page == kNoPage) == gone, "block ", block, " of slot ", slot, " has page ",
                     page, ", the slot keeps blocks from ", s.kept_from, " on");
      const PrefixIndex::Node of_block = block < s.shared ? node : PrefixIndex::kNone;
      if (block < s.shared) {
        SPECDEC_ENSURE(!index_->is_root(node), "slot ", slot, " shares ", s.shared,
                       " blocks, its path is shorter");
        node = index_->parent(node);
      }
      if (gone) continue;
      in_pool(page, "slot", slot);
      ++held[page];
      const bool published = index_ && index_->contains(page);
      SPECDEC_ENSURE(published == (block < s.shared), "page ", page, ", block ", block, " of slot ",
                     slot, ", is ", published ? "" : "not ", "published, the slot shares ",
                     s.shared);
      SPECDEC_ENSURE(published || held[page] == 1, "page ", page, " is held twice, second by slot ",
                     slot);
      SPECDEC_ENSURE(!published || index_->node_of(page) == of_block, "page ", page,
                     " is not the one of block ", block, " in slot ", slot);
    }
    SPECDEC_ENSURE(node == s.root, "slot ", slot, " shares ", s.shared,
                   " blocks, its path is longer");
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
  if (index_) index_->check_integrity(/*whole=*/span_.window == 0);
  check_parts();
}

}  // namespace specdec
