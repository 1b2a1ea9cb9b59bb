// Layers with narrow windows under a table with prefix reuse: what every row reads through every
// window is what was written there for its text, whoever wrote it, wherever the part lies now.
#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "kv/page_parts.h"
#include "kv/page_table.h"

namespace specdec {
namespace {

constexpr int kNarrowPages = 48, kSlots = 4, kPageSize = 4, kMostRows = 8, kLag = 5;
constexpr std::int64_t kGarbage = -7;

struct NarrowCase {
  bool numbered, reuse;
  AttentionSpan span;
  std::int64_t sinks;
};

// What a slot held that gave its pages back, as swapping to the host keeps it.
struct Saved {
  int kept_from;
  std::int64_t length;
  PageTable::Seen seen;
  std::vector<std::vector<std::int64_t>> memory;                 // by block
  std::vector<std::map<int, std::vector<std::int64_t>>> narrow;  // by window and block
};

class NarrowWorld {
 public:
  NarrowWorld(const NarrowCase& c, unsigned seed)
      : c_(c),
        table_(kNarrowPages, kPageSize, kSlots, 20, c.reuse, 64, c.span),
        memory_(kNarrowPages, std::vector<std::int64_t>(kPageSize, kGarbage)),
        rng_(seed) {
    NarrowWindows narrow;
    narrow.windows = windows_;
    narrow.sink_tokens = c.sinks;
    narrow.numbered = c.numbered;
    for (const int window : windows_) {
      const std::int64_t each = (window - 1 + kMostRows + kLag + 2 * (kPageSize - 1)) / kPageSize;
      narrow.most.push_back(static_cast<int>(
          std::min<std::int64_t>(kNarrowPages, kSlots * (each + pages_for(c.sinks, kPageSize)))));
    }
    most_ = narrow.most;
    narrow_.resize(windows_.size());
    for (std::size_t i = 0; i < windows_.size(); ++i) {
      narrow_[i].assign(kNarrowPages, std::vector<std::int64_t>(kPageSize, kGarbage));
    }
    table_.narrow(narrow, [this](int window, std::int32_t page) {
      ++gone_;
      if (!c_.numbered) narrow_[window][page].assign(kPageSize, kGarbage);
    });
    for (int i = 0; i < 3; ++i) {
      std::vector<TokenId> text;
      for (int t = 0; t < 70; ++t) text.push_back(below(2));
      bases_.push_back(text);
    }
  }

  void run(int turns) {
    for (int turn = 0; turn < turns; ++turn) {
      const int slot = below(kSlots);
      Slot& s = slots_[slot];
      if (s.saved) {
        come_back(slot);
      } else if (!s.open) {
        begin(slot);
      } else if (const int what = below(16); what == 0 || s.len >= 60) {
        end(slot);
      } else if (what == 1) {
        give_way(slot);
      } else {
        step(slot);
      }
      table_.check_integrity();
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      if (slots_[slot].open && !slots_[slot].saved) end(slot);
    }
    table_.drop_unused();
    table_.check_integrity();
    CHECK_EQ(table_.free_pages(), kNarrowPages);
  }

  std::int64_t read = 0, attached = 0, came_back = 0, gone_ = 0;

 private:
  struct Slot {
    bool open = false;
    std::vector<TokenId> text;
    std::int64_t len = 0;  // tokens whose K/V is there
    std::int64_t row = 0;  // the least position of a row that is still to be read
    std::optional<Saved> saved;
  };

  int below(int n) { return static_cast<int>(rng_() % static_cast<unsigned>(n)); }

  // What a layer's K/V at a position says: it depends on all tokens up to there.
  static std::int64_t value(const std::vector<TokenId>& text, std::int64_t position) {
    std::uint64_t hash = 1;
    for (std::int64_t i = 0; i <= position; ++i) hash = hash * 1000003u + text[i] + 17;
    return static_cast<std::int64_t>(hash >> 1);
  }

  void begin(int slot) {
    Slot& s = slots_[slot];
    s.text = bases_[below(3)];
    for (int i = 5 + below(60); i < 70; ++i) s.text[i] = below(2);
    table_.open(slot, "");
    s.open = true;
    s.len = kPageSize * table_.attach(slot, s.text.data(), 30 + below(30));
    s.row = s.len;
    attached += s.len;
    if (s.len > 0) look(slot, s.len);
  }

  // Rows at s.len and behind are written and read; some of them stay.
  void step(int slot) {
    Slot& s = slots_[slot];
    const int rows = 1 + below(kMostRows);
    if (!table_.reserve(slot, s.len + rows)) return;
    table_.cover(slot, s.len, s.len + rows);
    for (std::int64_t p = s.len; p < s.len + rows; ++p) {
      const auto block = static_cast<std::size_t>(p / kPageSize);
      memory_[table_.pages(slot)[block]][p % kPageSize] = value(s.text, p);
      for (std::size_t i = 0; i < windows_.size(); ++i) {
        at(i, slot, static_cast<int>(block))[p % kPageSize] = value(s.text, p);
      }
    }
    for (std::int64_t p = s.len; p < s.len + rows; ++p) look(slot, p, p + 1);
    s.len += 1 + below(rows);
    table_.commit(slot, s.len);
    table_.rewind(slot);
    if (c_.reuse && below(2) == 0) {
      table_.publish(slot, s.text.data(), s.len, /*swap=*/below(2) == 0);
    }
    s.row = std::max(s.row, s.len - below(kLag));
    table_.trim(slot, s.row, below(3) > 0);
    look(slot, s.row, s.len);
  }

  // The part that a window's layers have of a block of the slot.
  std::vector<std::int64_t>& at(std::size_t window, int slot, int block) {
    const std::int32_t number = table_.part(static_cast<int>(window), slot, block);
    CHECK(number != PageParts::kNone);
    CHECK(number < (c_.numbered ? most_[window] : kNarrowPages));
    return narrow_[window][number];
  }

  // A row at `row` reads all that it sees of the first `length` tokens.
  void look(int slot, std::int64_t row, std::int64_t length = -1) {
    Slot& s = slots_[slot];
    if (length < 0) length = s.len;
    const auto sees = [row](const AttentionSpan& span, std::int64_t p) {
      return span.window == 0 || p < span.sink_tokens || p > row - span.window;
    };
    for (std::int64_t p = 0; p < length; ++p) {
      const std::int64_t expected = value(s.text, p);
      const int block = static_cast<int>(p / kPageSize);
      if (sees(c_.span, p)) {
        CHECK_EQ(memory_[table_.pages(slot)[block]][p % kPageSize], expected);
      }
      for (std::size_t i = 0; i < windows_.size(); ++i) {
        if (!sees({windows_[i], c_.sinks}, p)) continue;
        CHECK_EQ(at(i, slot, block)[p % kPageSize], expected);
        ++read;
      }
    }
  }

  void end(int slot) {
    table_.release(slot);
    slots_[slot] = {};
  }

  void give_way(int slot) {
    Slot& s = slots_[slot];
    Saved saved{table_.kept_from(slot), s.len, table_.seen(slot), {}, {}};
    saved.narrow.resize(windows_.size());
    const auto& pages = table_.pages(slot);
    for (std::size_t block = 0; block < pages.size(); ++block) {
      saved.memory.push_back({});
      if (pages[block] == PageTable::kNoPage) continue;
      saved.memory.back() = memory_[pages[block]];
      for (std::size_t i = 0; i < windows_.size(); ++i) {
        const int b = static_cast<int>(block);
        const std::int32_t number = table_.part(static_cast<int>(i), slot, b);
        if (number != PageParts::kNone) saved.narrow[i][b] = narrow_[i][number];
      }
    }
    table_.release(slot);
    s.saved = saved;
  }

  void come_back(int slot) {
    Slot& s = slots_[slot];
    const Saved& saved = *s.saved;
    table_.open(slot, "");
    const bool attaches = c_.reuse && c_.span.window == 0;
    const int blocks = attaches ? table_.attach(slot, s.text.data(), saved.length) : 0;
    if (!table_.restore(slot, saved.length, saved.kept_from, saved.seen)) {
      table_.release(slot);
      return;
    }
    const auto& pages = table_.pages(slot);
    for (std::size_t block = blocks; block < saved.memory.size(); ++block) {
      if (pages[block] == PageTable::kNoPage) continue;
      memory_[pages[block]] = saved.memory[block];
      for (std::size_t i = 0; i < windows_.size(); ++i) {
        const auto kept = saved.narrow[i].find(static_cast<int>(block));
        if (kept == saved.narrow[i].end()) continue;
        at(i, slot, static_cast<int>(block)) = kept->second;
      }
    }
    ++came_back;
    s.row = std::max(s.row, std::int64_t{blocks} * kPageSize);  // what is taken over has no rows
    s.saved.reset();
    look(slot, s.len);
  }

  NarrowCase c_;
  std::vector<int> windows_{1, 6, 11}, most_;
  PageTable table_;
  std::vector<std::vector<std::int64_t>> memory_;               // by page
  std::vector<std::vector<std::vector<std::int64_t>>> narrow_;  // by window and number
  std::vector<std::vector<TokenId>> bases_;
  Slot slots_[kSlots];
  std::mt19937 rng_;
};

TEST(narrow_windows_rows_read_what_was_written) {
  for (const bool numbered : {false, true}) {
    for (const bool reuse : {false, true}) {
      for (const auto& [span, sinks] : {std::pair{AttentionSpan{}, 0},
                                        {AttentionSpan{}, 5},
                                        {AttentionSpan{20, 0}, 0},
                                        {AttentionSpan{20, 3}, 3}}) {
        NarrowWorld world({numbered, reuse, span, sinks}, 11);
        world.run(4000);
        CHECK(world.read > 50000);
        CHECK(world.gone_ > 1000);
        CHECK(world.came_back > 100);
        CHECK_EQ(world.attached > 1000, reuse);
      }
    }
  }
}

TEST(narrow_windows_keep_a_prefix_that_somebody_may_want) {
  std::vector<TokenId> text(40);
  for (int i = 0; i < 40; ++i) text[i] = i;
  for (const int most : {3, 10}) {
    std::vector<std::int32_t> gone;
    PageTable table(10, 4, 2, 10, true);
    table.narrow({{6}, {most}, 0, true}, [&](int, std::int32_t page) { gone.push_back(page); });
    table.open(0, "");
    for (std::int64_t at = 0; at < 32; at += 4) {
      CHECK(table.reserve(0, at + 4));
      table.cover(0, at, at + 4);
      table.commit(0, at + 4);
      table.trim(0, at + 4);
    }
    table.publish(0, text.data(), 32);
    // With room for all parts every prefix can be taken over, else the one whose parts are there.
    CHECK_EQ(table.match("", text.data(), 17).blocks, most == 10 ? 4 : 0);
    CHECK_EQ(table.match("", text.data(), 40).blocks, 8);
    CHECK_EQ(gone.size(), most == 10 ? 0u : 5u);
    table.open(1, "");
    CHECK_EQ(table.attach(1, text.data(), 40), 8);
    // Seen by two: 27.. through the window of 6.
    CHECK_EQ(table.part(0, 1, 6), table.part(0, 0, 6));
    CHECK_EQ(table.part(0, 1, 5), PageParts::kNone);
    table.release(0);
    CHECK(table.part(0, 1, 7) != PageParts::kNone);
    table.check_integrity();
  }
}

TEST(narrow_windows_another_page_takes_the_place_of_one_without_parts) {
  std::vector<TokenId> text(16, 3);
  PageTable table(12, 4, 2, 6, true);
  table.narrow({{4}, {4}, 0, true}, {});
  const auto read = [&](int slot) {
    for (std::int64_t at = 0; at < 16; at += 4) {
      CHECK(table.reserve(slot, at + 4));
      table.cover(slot, at, at + 4);
      table.commit(slot, at + 4);
    }
    table.publish(slot, text.data(), 16, /*swap=*/false);
  };
  table.open(0, "");
  read(0);
  table.release(0);
  // Others take all parts; the pages stay published.
  table.open(1, "other");
  CHECK(table.reserve(1, 16));
  table.cover(1, 0, 16);
  CHECK_EQ(table.cached_pages(), 4);
  CHECK_EQ(table.match("", text.data(), 16).blocks, 0);
  table.release(1);
  table.open(0, "");
  CHECK_EQ(table.attach(0, text.data(), 16), 0);
  read(0);
  CHECK_EQ(table.shared_tokens(0), 16);
  table.check_integrity();
  table.release(0);
  CHECK_EQ(table.match("", text.data(), 16).blocks, 4);
  CHECK_EQ(table.cached_pages(), 4);
}

TEST(narrow_windows_refuse_what_cannot_be) {
  PageTable table(4, 4, 1, 4, false, 64, {8, 2});
  CHECK_THROWS(table.narrow({{0}, {4}}, {}), std::invalid_argument, "window 0");
  CHECK_THROWS(table.narrow({{8}, {4}}, {}), std::invalid_argument, "give a narrower one");
  CHECK_THROWS(table.narrow({{4}, {4}, 3}, {}), std::invalid_argument, "sink_tokens = 3");
  CHECK_THROWS(table.narrow({{4}, {5}}, {}), std::invalid_argument, "give 1 to num_pages = 4");
  CHECK_THROWS(table.narrow({{4}, {}}, {}), std::invalid_argument, "room for the parts of 0");
  PageTable one(4, 4, 1, 4);
  one.narrow({{4}, {1}, 0, true}, {});
  CHECK(one.reserve(0, 8));
  CHECK_THROWS(one.cover(0, 0, 8), std::logic_error, "all 1 are seen");
}

}  // namespace
}  // namespace specdec
