// Which pages hold the K/V of which request, and how many tokens of them are committed.
//
// Host bookkeeping only: no K/V memory is touched here. Without reuse a page is on the free list or
// in exactly one slot's run. With reuse a slot may publish its committed full pages under their
// tokens; a later slot of the same salt attaches them instead of computing them. Invariants,
// checked by check_integrity():
//   * every page is free, published and unused, or held by as many slots as its count says;
//   * a slot holds at least ceil(length / page_size) pages;
//   * the first `shared` pages of a slot are published and lie on one path of its salt's tree; they
//     are full of committed tokens, so nobody writes to them again. The others are the slot's own.
//
// reserve() is all or nothing. Free pages are handed out last-freed first; when none is left, the
// published page that was unused for longest gives way.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/pages.h"
#include "base/types.h"
#include "kv/prefix_index.h"

namespace specdec {

// Counters of prefix reuse since the table was made.
struct ReuseStats {
  std::int64_t attached_pages = 0;      // pages that slots took over instead of computing them
  std::int64_t published_pages = 0;     // pages entered into the index
  std::int64_t deduplicated_pages = 0;  // own pages given up for an equal published one
  std::int64_t evicted_pages = 0;       // unused published pages that gave way
};

class PageTable {
 public:
  PageTable(int num_pages, int page_size, int num_slots, int max_pages_per_slot,
            bool enable_block_reuse = false, int hash_bits = 64);

  // Makes room for `tokens` tokens in total. False, and nothing changed, when pages are short.
  bool reserve(int slot, std::int64_t tokens);
  // `length` tokens of the slot are final; they must fit into the reserved pages.
  void commit(int slot, std::int64_t length);
  // Returns the pages that the committed tokens do not need (rejected drafts leave no trace).
  void rewind(int slot);
  // Returns all pages of the slot; published ones stay in the index until they have to give way.
  void release(int slot);

  // What attach() would take over for a prompt.
  struct Match {
    int pages = 0;
    int unused = 0;  // of them, how many nobody holds: they count as free until they are attached
  };
  // The published full blocks that `tokens` start with, under this salt. At most count / page_size.
  Match match(const std::string& salt, const TokenId* tokens, std::int64_t count) const;
  // Gives an empty slot its salt; only then it may attach and publish. Nothing without reuse.
  void open(int slot, const std::string& salt);
  // Takes over published blocks that continue the slot's committed tokens, as far as `tokens` (the
  // slot's text from its start) agree; returns how many pages. The slot must hold nothing else.
  int attach(int slot, const TokenId* tokens, std::int64_t count);
  // Publishes the slot's full pages among the first `count` committed tokens. A page whose block is
  // published already is given up for that one, so the slot's run may change; without `swap` its
  // run stays as it is and publishing ends there.
  void publish(int slot, const TokenId* tokens, std::int64_t count, bool swap = true);
  // Forgets published pages that no slot holds; returns how many.
  int drop_unused();

  bool is_open(int slot) const { return slots_[slot].root != PrefixIndex::kNone; }
  std::int64_t length(int slot) const { return slots_[slot].length; }
  const std::vector<std::int32_t>& pages(int slot) const { return slots_[slot].pages; }
  // Tokens of the slot that lie in published pages: nothing before them may be written.
  std::int64_t shared_tokens(int slot) const {
    return static_cast<std::int64_t>(slots_[slot].shared) * page_size_;
  }
  int num_pages() const { return num_pages_; }
  int page_size() const { return page_size_; }
  int max_pages_per_slot() const { return max_pages_per_slot_; }
  bool reuse() const { return index_ != nullptr; }
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
  struct Slot {
    std::vector<std::int32_t> pages;
    std::int64_t length = 0;
    int shared = 0;  // leading pages that are published
    PrefixIndex::Node root = PrefixIndex::kNone;
  };
  std::int32_t take_page();
  void hold(std::int32_t published);
  void let_go(std::int32_t page);
  PrefixIndex::Node node_before(const Slot& slot, int block) const {
    return block == 0 ? slot.root : slot.pages[block - 1];
  }

  int num_pages_, page_size_, max_pages_per_slot_;
  std::vector<std::int32_t> free_;
  std::vector<std::int32_t> holders_;  // by page: slots that hold it
  std::vector<Slot> slots_;
  std::unique_ptr<PrefixIndex> index_;  // null: no reuse
  ReuseStats reuse_stats_;
};

}  // namespace specdec
