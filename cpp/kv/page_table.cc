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
    return index_->take_page(index_->longest_unused());
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
    free_.push_back(page);
  }
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
    free_.push_back(index_->take_page(index_->longest_unused()));
    ++reuse_stats_.evicted_pages;
  }
}

// The first block behind those of the sink tokens that a row at `position` sees a token of.
int PageTable::first_seen(const AttentionSpan& span, std::int64_t position) const {
  if (span.window == 0) return 0;
  const std::int64_t low = std::max<std::int64_t>(0, position - span.window + 1);
  return static_cast<int>(std::max(pages_for(span.sink_tokens), low / page_size_));
}

void PageTable::watch(std::vector<int> windows, std::int64_t sink_tokens, Leave leave) {
  SPECDEC_REQUIRE(!index_, "watch: a published page may be read again through any window");
  for (const int window : windows) {
    SPECDEC_REQUIRE(window >= 1, "watch: window ", window, ": give 1 or more tokens");
    watched_.push_back({window, sink_tokens});
  }
  leave_ = std::move(leave);
  for (Slot& slot : slots_) slot.left_from.assign(watched_.size(), 0);
}

// Tells the windows that are watched which of the slot's pages lie behind them.
void PageTable::leave_behind(Slot& slot, std::int64_t position) {
  for (std::size_t i = 0; i < watched_.size(); ++i) {
    const int first = first_seen(watched_[i], position);
    const int sinks = static_cast<int>(pages_for(watched_[i].sink_tokens));
    for (int b = std::max(slot.left_from[i], sinks); b < first; ++b) {
      if (slot.pages[b] != kNoPage) leave_(static_cast<int>(i), slot.pages[b]);
    }
    slot.left_from[i] = std::max(slot.left_from[i], first);
  }
}

// A block's page is given back: to those windows that have not left it yet.
void PageTable::leave_whole(const Slot& slot, int block) {
  for (std::size_t i = 0; i < watched_.size(); ++i) {
    const bool is_sink = block < pages_for(watched_[i].sink_tokens);
    if (is_sink || block >= slot.left_from[i]) leave_(static_cast<int>(i), slot.pages[block]);
  }
}

// Gives back the slot's pages in front of block `first`, but for those of sink tokens.
void PageTable::give_back(Slot& slot, int first) {
  if (first <= sink_blocks()) return;
  for (int b = std::max(slot.kept_from, sink_blocks()); b < first; ++b) {
    if (slot.pages[b] != kNoPage) {
      leave_whole(slot, b);
      let_go(slot.pages[b]);
    }
    slot.pages[b] = kNoPage;
  }
  slot.kept_from = std::max(slot.kept_from, first);
}

void PageTable::trim(int slot, std::int64_t position) {
  Slot& s = slots_[slot];
  if (span_.window == 0 && watched_.empty()) return;
  SPECDEC_ENSURE(position <= s.length, "slot ", slot, " is trimmed for position ", position, ", ",
                 s.length, " tokens are committed");
  leave_behind(s, position);
  give_back(s, first_seen(position));
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
    if (page != kNoPage) leave_whole(s, static_cast<int>(s.pages.size()) - 1);
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
  std::fill(s.left_from.begin(), s.left_from.end(), 0);
  if (s.root != PrefixIndex::kNone) {
    index_->release(s.tip);
    index_->release_root(s.root);
  }
  s.root = s.tip = PrefixIndex::kNone;
}

bool PageTable::restore(int slot, std::int64_t length, int kept_from) {
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
    if (!gone(block)) holders_[s.pages.back()] = 1;
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
  PrefixIndex::Node node = root;
  int best = 0, run = 0;  // run: blocks up to here that have their page
  for (std::int64_t block = 0; node != PrefixIndex::kNone && block < count / page_size_; ++block) {
    node = index_->find(node, tokens + block * page_size_);
    if (node == PrefixIndex::kNone) break;
    const bool there = index_->page(node) != PrefixIndex::kNone;
    if (!there && block < std::max(sink_blocks(), span_.window == 0 ? max_pages_per_slot_ : 0)) {
      break;
    }
    path_.push_back(node);
    run = there ? run + 1 : 0;
    const int blocks = static_cast<int>(block) + 1;
    if (run >= blocks - first_seen(std::int64_t{blocks} * page_size_)) best = blocks;
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
  give_back(s, first);
  s.shared = blocks;
  set_tip(s, path_[blocks - 1]);
  s.length = shared_tokens(slot);
  return blocks - before;
}

void PageTable::publish(int slot, const TokenId* tokens, std::int64_t count, bool swap) {
  Slot& s = slots_[slot];
  if (s.root == PrefixIndex::kNone) return;
  SPECDEC_ENSURE(count <= s.length, "slot ", slot, " publishes ", count, " tokens, ", s.length,
                 " are committed");
  for (const int blocks = static_cast<int>(count / page_size_); s.shared < blocks; ++s.shared) {
    const TokenId* block = tokens + static_cast<std::ptrdiff_t>(s.shared) * page_size_;
    std::int32_t& own = s.pages[s.shared];
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
    } else if (!swap) {
      break;
    } else {
      // Somebody else was first. Hanging the slot's next pages under a page that it does not hold
      // would pin that one; holding it instead of our copy frees a page.
      hold(published);
      let_go(own);
      own = published;
      ++reuse_stats_.deduplicated_pages;
    }
    set_tip(s, node);
  }
  bound_index();
}

int PageTable::drop_unused() {
  int dropped = 0;
  for (; index_ && index_->num_unused() > 0; ++dropped) {
    free_.push_back(index_->take_page(index_->longest_unused()));
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
}

}  // namespace specdec
