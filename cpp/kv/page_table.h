// Which pages hold the K/V of which request, and how many tokens of them are committed.
//
// Host bookkeeping only: no K/V memory is touched here. Without reuse a page is on the free list or
// in exactly one slot's run. With reuse a slot may publish its committed full pages under their
// tokens; a later slot of the same salt attaches them instead of computing them. Invariants,
// checked by check_integrity():
//   * every page is free, published and unused, or held by as many slots as its count says;
//   * a slot has at least ceil(length / page_size) blocks;
//   * the first `shared` blocks of a slot are published and lie on one path of its salt's tree;
//   they
//     are full of committed tokens, so nobody writes to them again. The others are the slot's own.
//
// With an attention window no row sees what lies behind it but the sink tokens, so trim() gives
// those pages back while the slot goes on: the blocks stay in its run as kNoPage. A published page
// among them stays in the index until it has to give way, first of all; the texts behind it remain
// published. A prompt takes over as much as its next row sees all of. Blocks are attached and
// published under the one window and the sink tokens that the table was made with.
//
// Layers with windows narrower than that hold their part of a page only while a row sees it through
// theirs (narrow(), page_parts.h): of the pages of a step's rows from cover() on, of those that
// attach() takes over, until trim() or the page's end. A prompt takes over only what its next row
// sees all parts of, too.
//
// reserve() is all or nothing. Free pages are handed out last-freed first; when none is left, the
// published page that was unused for longest gives way.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/pages.h"
#include "base/types.h"
#include "kv/page_parts.h"
#include "kv/prefix_index.h"

namespace specdec {

// Windows of layers that see less than others do.
struct NarrowWindows {
  std::vector<int> windows;  // distinct
  std::vector<int> most;     // by window: parts of pages that its layers have room for
  std::int64_t sink_tokens = 0;
  bool numbered = false;  // PageParts
};

// Counters of prefix reuse since the table was made.
struct ReuseStats {
  std::int64_t attached_pages = 0;      // pages that slots took over instead of computing them
  std::int64_t published_pages = 0;     // pages entered into the index
  std::int64_t deduplicated_pages = 0;  // own pages given up for an equal published one
  std::int64_t evicted_pages = 0;       // unused published pages that gave way
};

class PageTable {
 public:
  static constexpr std::int32_t kNoPage = -1;  // of a block that was given back

  PageTable(int num_pages, int page_size, int num_slots, int max_pages_per_slot,
            bool enable_block_reuse = false, int hash_bits = 64, AttentionSpan span = {});

  // Before the first slot has pages. gone(i, page), unless it is null: the layers of windows[i]
  // have no part of the page any more.
  void narrow(const NarrowWindows& windows, std::function<void(int, std::int32_t)> gone);
  // The rows at positions `from` to `to` - 1 are to be written: their pages, which are reserved,
  // get the parts of narrow windows.
  void cover(int slot, std::int64_t from, std::int64_t to);
  int num_narrow() const { return static_cast<int>(narrow_.size()); }
  // The number of a narrow window's part of a block of the slot, PageParts::kNone: the slot sees
  // none.
  std::int32_t part(int window, int slot, int block) const;
  // By narrow window and block: which parts the slot sees.
  using Seen = std::vector<std::vector<std::uint8_t>>;
  Seen seen(int slot) const;
  // The narrowest window of any layer; 0: none has one.
  std::int64_t narrowest() const;

  // Makes room for `tokens` tokens in total. False, and nothing changed, when pages are short.
  bool reserve(int slot, std::int64_t tokens);
  // `length` tokens of the slot are final; they must fit into the reserved pages.
  void commit(int slot, std::int64_t length);
  // Returns the pages that the committed tokens do not need (rejected drafts leave no trace).
  void rewind(int slot);
  // Returns the pages that no row sees whose position is at least `position`, which is committed:
  // those of narrow windows, and, if `whole`, of all layers. Nothing without a window.
  void trim(int slot, std::int64_t position, bool whole = true);
  // Returns all pages of the slot; published ones stay in the index until they have to give way.
  void release(int slot);
  // Gives a slot that holds nothing but what it has attached pages for `length` committed tokens,
  // as a slot had them that was trimmed to its blocks from `kept_from` on and saw the parts `seen`:
  // the K/V is copied there by the caller. False, and nothing changed, when pages are short.
  bool restore(int slot, std::int64_t length, int kept_from, const Seen& seen = {});

  // What attach() would take over for a prompt.
  struct Match {
    int blocks = 0;
    int pages = 0;   // of them, as many as the row behind them sees
    int unused = 0;  // of those, how many nobody holds: they count as free until they are attached
  };
  // The published full blocks that `tokens` start with, under this salt. At most count / page_size,
  // and no more than have every page that the row behind them sees.
  Match match(const std::string& salt, const TokenId* tokens, std::int64_t count) const;
  // Gives an empty slot its salt; only then it may attach and publish. Nothing without reuse.
  void open(int slot, const std::string& salt);
  // Takes over published blocks that continue the slot's committed tokens, as far as `tokens` (the
  // slot's text from its start) agree; returns how many blocks. The slot must hold nothing else.
  int attach(int slot, const TokenId* tokens, std::int64_t count);
  // Publishes the slot's full pages among the first `count` committed tokens. A page whose block is
  // published already is given up for that one, so the slot's run may change; without `swap` its
  // run stays as it is and publishing ends there.
  void publish(int slot, const TokenId* tokens, std::int64_t count, bool swap = true);
  // Forgets published pages that no slot holds; returns how many.
  int drop_unused();

  bool is_open(int slot) const { return slots_[slot].root != PrefixIndex::kNone; }
  std::int64_t length(int slot) const { return slots_[slot].length; }
  // By block; kNoPage: given back.
  const std::vector<std::int32_t>& pages(int slot) const { return slots_[slot].pages; }
  // How many of them there are.
  int held(int slot) const { return static_cast<int>(slots_[slot].pages.size()) - holes(slot); }
  // Pages that are missing for `tokens` tokens in total.
  std::int64_t missing(int slot, std::int64_t tokens) const {
    return pages_for(tokens) - static_cast<std::int64_t>(slots_[slot].pages.size());
  }
  // The first block behind those that were given back, but for the sink tokens'.
  int kept_from(int slot) const { return slots_[slot].kept_from; }
  // Leading blocks that other slots hold, too; they stay when this slot gives its pages back.
  int held_by_others(int slot) const;
  // Tokens of the slot that lie in published blocks: nothing before them may be written.
  std::int64_t shared_tokens(int slot) const {
    return static_cast<std::int64_t>(slots_[slot].shared) * page_size_;
  }
  int num_pages() const { return num_pages_; }
  int page_size() const { return page_size_; }
  int max_pages_per_slot() const { return max_pages_per_slot_; }
  bool reuse() const { return index_ != nullptr; }
  const AttentionSpan& span() const { return span_; }
  // Pages that reserve() can hand out: unused published ones are among them.
  int free_pages() const { return static_cast<int>(free_.size()) + cached_pages(); }
  int cached_pages() const { return index_ ? index_->num_unused() : 0; }
  const ReuseStats& reuse_stats() const { return reuse_stats_; }
  std::size_t index_bytes() const { return index_ ? index_->memory_bytes() : 0; }
  std::int64_t pages_for(std::int64_t tokens) const {
    return specdec::pages_for(tokens, page_size_);
  }

  // Throws std::logic_error when an invariant does not hold. O(pages).
  void check_integrity() const;

 private:
  // What a slot sees through a narrow window.
  struct View {
    int left_from = 0;               // blocks of no sink token before it were left
    std::vector<std::uint8_t> sees;  // by block, as far as any is seen
  };
  struct Narrow {
    AttentionSpan span;
    PageParts parts;
  };
  struct Slot {
    std::vector<std::int32_t> pages;
    std::int64_t length = 0;
    int shared = 0;           // leading blocks that are published
    int kept_from = 0;        // blocks of no sink token before it were given back
    std::vector<View> views;  // by narrow window
    PrefixIndex::Node root = PrefixIndex::kNone,
                      tip = PrefixIndex::kNone;  // tip: of block shared - 1
  };
  std::int32_t take_page();
  void hold(std::int32_t published);
  void let_go(std::int32_t page);
  void set_tip(Slot& slot, PrefixIndex::Node node);
  void bound_index();
  int sink_blocks() const { return static_cast<int>(pages_for(span_.sink_tokens)); }
  int holes(int slot) const { return std::max(0, slots_[slot].kept_from - sink_blocks()); }
  int first_seen(std::int64_t position) const { return first_seen(span_, position); }
  int first_seen(const AttentionSpan& span, std::int64_t position) const;
  bool is_seen(const AttentionSpan& span, std::int64_t position, int block) const;
  static bool sees(const View& view, int block);
  void see(Slot& slot, int window, int block);
  void leave_behind(Slot& slot, std::int64_t position);
  void leave_block(Slot& slot, int block);
  void give_back(Slot& slot, int first);
  void give_page(std::int32_t page);
  bool has_what_is_seen(const Slot& slot, int block, std::int32_t page) const;
  void swap_page(Slot& slot, int block, std::int32_t published);
  void check_parts() const;
  int walk(PrefixIndex::Node root, const TokenId* tokens, std::int64_t count) const;

  int num_pages_, page_size_, max_pages_per_slot_;
  AttentionSpan span_;
  std::vector<Narrow> narrow_;
  std::vector<std::int32_t> free_;
  std::vector<std::int32_t> holders_;  // by page: slots that hold it
  std::vector<Slot> slots_;
  std::unique_ptr<PrefixIndex> index_;           // null: no reuse
  mutable std::vector<PrefixIndex::Node> path_;  // of walk()
  mutable std::vector<int> runs_;                // the same, by narrow window
  ReuseStats reuse_stats_;
};

}  // namespace specdec
