// What of a slot's pages its rows see: through the window of all layers, whose pages are given back
// behind it, and through narrower ones, whose layers give their parts back.
#include <algorithm>

#include "base/check.h"
#include "kv/page_table.h"

namespace specdec {

// The first block behind those of the sink tokens that a row at `position` sees a token of.
int PageTable::first_seen(const AttentionSpan& span, std::int64_t position) const {
  if (span.window == 0) return 0;
  const std::int64_t low = std::max<std::int64_t>(0, position - span.window + 1);
  return static_cast<int>(std::max(pages_for(span.sink_tokens), low / page_size_));
}

bool PageTable::is_seen(const AttentionSpan& span, std::int64_t position, int block) const {
  return block < pages_for(span.sink_tokens) || block >= first_seen(span, position);
}

void PageTable::narrow(const NarrowWindows& windows, std::function<void(int, std::int32_t)> gone) {
  SPECDEC_REQUIRE(windows.most.size() == windows.windows.size(), "narrow: ", windows.windows.size(),
                  " windows, room for the parts of ", windows.most.size());
  // What is seen through a narrow window is seen through the others, too.
  const bool inside = span_.window == 0 || windows.sink_tokens <= span_.sink_tokens;
  SPECDEC_REQUIRE(inside, "narrow: sink_tokens = ", windows.sink_tokens, ", of all layers ",
                  span_.sink_tokens, ": give no more");
  for (std::size_t i = 0; i < windows.windows.size(); ++i) {
    SPECDEC_REQUIRE(span_.window == 0 || windows.windows[i] < span_.window, "narrow: window ",
                    windows.windows[i], ", of all layers ", span_.window, ": give a narrower one");
    SPECDEC_REQUIRE(windows.windows[i] >= 1, "narrow: window ", windows.windows[i],
                    ": give 1 or more tokens");
    PageParts::Gone of_window;
    if (gone) of_window = [gone, i](std::int32_t page) { gone(static_cast<int>(i), page); };
    narrow_.push_back({{windows.windows[i], windows.sink_tokens},
                       PageParts(num_pages_, windows.most[i], windows.numbered,
                                 /*keeps_idle=*/index_ != nullptr, std::move(of_window))});
  }
  for (Slot& slot : slots_) slot.views.resize(narrow_.size());
}

std::int64_t PageTable::narrowest() const {
  std::int64_t least = span_.window;
  for (const Narrow& narrow : narrow_) {
    least = least == 0 ? narrow.span.window : std::min(least, narrow.span.window);
  }
  return least;
}

bool PageTable::sees(const View& view, int block) {
  return static_cast<std::size_t>(block) < view.sees.size() && view.sees[block] != 0;
}

std::int32_t PageTable::part(int window, int slot, int block) const {
  const Slot& s = slots_[slot];
  if (!sees(s.views[window], block)) return PageParts::kNone;
  return narrow_[window].parts.number(s.pages[block]);
}

PageTable::Seen PageTable::seen(int slot) const {
  Seen all;
  for (const View& view : slots_[slot].views) all.push_back(view.sees);
  return all;
}

void PageTable::see(Slot& slot, int window, int block) {
  View& view = slot.views[window];
  if (sees(view, block)) return;
  if (view.sees.size() <= static_cast<std::size_t>(block)) view.sees.resize(block + 1, 0);
  narrow_[window].parts.see(slot.pages[block]);
  view.sees[block] = 1;
}

void PageTable::cover(int slot, std::int64_t from, std::int64_t to) {
  Slot& s = slots_[slot];
  SPECDEC_ENSURE(narrow_.empty() || pages_for(to) <= static_cast<std::int64_t>(s.pages.size()),
                 "slot ", slot, " is to write ", to, " tokens in ", s.pages.size(), " pages");
  for (int i = 0; i < num_narrow(); ++i) {
    for (auto block = from / page_size_; block < pages_for(to); ++block) {
      see(s, i, static_cast<int>(block));
    }
  }
}

// Leaves the parts that no row sees whose position is at least `position`.
void PageTable::leave_behind(Slot& slot, std::int64_t position) {
  for (std::size_t i = 0; i < narrow_.size(); ++i) {
    View& view = slot.views[i];
    const int first = first_seen(narrow_[i].span, position);
    const int sinks = static_cast<int>(pages_for(narrow_[i].span.sink_tokens));
    for (int b = std::max(view.left_from, sinks); b < first; ++b) {
      if (!sees(view, b)) continue;
      narrow_[i].parts.leave(slot.pages[b]);
      view.sees[b] = 0;
    }
    view.left_from = std::max(view.left_from, first);
  }
}

// The slot gives the block's page back: what it still sees of it.
void PageTable::leave_block(Slot& slot, int block) {
  for (std::size_t i = 0; i < narrow_.size(); ++i) {
    View& view = slot.views[i];
    if (!sees(view, block)) continue;
    narrow_[i].parts.leave(slot.pages[block]);
    view.sees[block] = 0;
  }
}

// Gives back the slot's pages in front of block `first`, but for those of sink tokens.
void PageTable::give_back(Slot& slot, int first) {
  if (first <= sink_blocks()) return;
  for (int b = std::max(slot.kept_from, sink_blocks()); b < first; ++b) {
    if (slot.pages[b] != kNoPage) {
      leave_block(slot, b);
      let_go(slot.pages[b]);
    }
    slot.pages[b] = kNoPage;
  }
  slot.kept_from = std::max(slot.kept_from, first);
}

void PageTable::trim(int slot, std::int64_t position, bool whole) {
  Slot& s = slots_[slot];
  if (span_.window == 0 && narrow_.empty()) return;
  SPECDEC_ENSURE(position <= s.length, "slot ", slot, " is trimmed for position ", position, ", ",
                 s.length, " tokens are committed");
  leave_behind(s, position);
  if (whole) give_back(s, first_seen(position));
}

// Every part that the slot sees of the block is there in `page`, too.
bool PageTable::has_what_is_seen(const Slot& slot, int block, std::int32_t page) const {
  for (std::size_t i = 0; i < narrow_.size(); ++i) {
    if (sees(slot.views[i], block) && !narrow_[i].parts.has(page)) return false;
  }
  return true;
}

// The slot holds a published page in the place of its own, which is equal.
void PageTable::swap_page(Slot& slot, int block, std::int32_t published) {
  const std::int32_t own = slot.pages[block];
  hold(published);
  for (std::size_t i = 0; i < narrow_.size(); ++i) {
    if (!sees(slot.views[i], block)) continue;
    narrow_[i].parts.see(published);
    narrow_[i].parts.leave(own);
  }
  let_go(own);
  slot.pages[block] = published;
}

void PageTable::check_parts() const {
  for (std::size_t i = 0; i < narrow_.size(); ++i) {
    std::vector<std::int32_t> seen(num_pages_, 0);
    for (const Slot& slot : slots_) {
      const View& view = slot.views[i];
      for (int block = 0; block < static_cast<int>(view.sees.size()); ++block) {
        if (!sees(view, block)) continue;
        SPECDEC_ENSURE(
            static_cast<std::size_t>(block) < slot.pages.size() && slot.pages[block] != kNoPage,
            "block ", block, " has no page, and its part is seen");
        ++seen[slot.pages[block]];
      }
    }
    narrow_[i].parts.check_integrity(seen);
    for (const std::int32_t page : free_) {
      SPECDEC_ENSURE(!narrow_[i].parts.has(page), "page ", page, " is free and has a part");
    }
  }
}

}  // namespace specdec
