// Pages behind an attention window: against what a row may see, with contents that say whose block
// of which text a page holds.
#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "kv/page_table.h"

namespace specdec {
namespace {

constexpr std::int32_t kGone = PageTable::kNoPage;

TEST(window_gives_back_what_no_row_sees) {
  // Pages of 4, rows see 6 tokens and the first 5.
  PageTable table(16, 4, 1, 16, false, 64, {6, 5});
  CHECK(table.reserve(0, 40));
  table.commit(0, 30);
  const std::vector<std::int32_t> all = table.pages(0);
  table.trim(0, 8);  // sees 3..8: block 1 holds a sink token
  CHECK_EQ(table.pages(0), all);
  table.trim(0, 16);  // sees 11..16
  CHECK_EQ(table.pages(0)[1], all[1]);
  CHECK_EQ(table.pages(0)[2], all[2]);
  table.trim(0, 17);  // sees 12..17
  CHECK_EQ(table.pages(0)[2], kGone);
  CHECK_EQ(table.pages(0)[3], all[3]);
  table.trim(0, 30);  // sees 25..30
  CHECK_EQ(table.held(0), 2 + 4);
  CHECK_EQ(table.free_pages(), 10);
  table.trim(0, 10);  // says less than is known
  CHECK_EQ(table.held(0), 6);
  table.check_integrity();
  CHECK_THROWS(table.trim(0, 31), std::logic_error, "trimmed for position 31, 30 tokens");
  table.rewind(0);
  CHECK_EQ(table.held(0), 4);
  CHECK(table.reserve(0, 41));  // blocks that were given back stay given back
  CHECK_EQ(table.held(0), 7);
  CHECK_EQ(table.missing(0, 45), 1);
  table.release(0);
  CHECK_EQ(table.free_pages(), 16);
  table.check_integrity();
}

TEST(window_as_long_as_the_text_gives_nothing_back) {
  for (const AttentionSpan span : {AttentionSpan{100, 0}, AttentionSpan{}, AttentionSpan{0, 7}}) {
    PageTable table(8, 4, 1, 8, false, 64, span);
    CHECK(table.reserve(0, 32));
    table.commit(0, 32);
    table.trim(0, 32);
    CHECK_EQ(table.held(0), 8);
    table.check_integrity();
  }
}

TEST(window_is_positive) {
  CHECK_THROWS(PageTable(4, 4, 1, 4, false, 64, {-1, 0}), std::invalid_argument,
               "attention_window = -1");
  CHECK_THROWS(PageTable(4, 4, 1, 4, false, 64, {1, -2}), std::invalid_argument,
               "sink_tokens = -2");
}

std::vector<TokenId> counting(int count) {
  std::vector<TokenId> text(count);
  for (int i = 0; i < count; ++i) text[i] = i;
  return text;
}

void read_all(PageTable& table, int slot, const std::vector<TokenId>& text) {
  const auto count = static_cast<std::int64_t>(text.size());
  table.open(slot, "");
  table.attach(slot, text.data(), count);
  CHECK(table.reserve(slot, count));
  table.commit(slot, count);
  table.publish(slot, text.data(), count);
  table.trim(slot, count);
  table.check_integrity();
}

TEST(window_pages_are_attached_while_every_visible_one_exists) {
  // 8 blocks of 2; rows see 4 tokens and the first 2.
  PageTable table(9, 2, 2, 16, true, 64, {4, 2});
  const std::vector<TokenId> text = counting(16);
  read_all(table, 0, text);
  // A row at 16 sees 13..16 and 0, 1: blocks 0, 6, 7. The others are unused, still there.
  CHECK_EQ(table.held(0), 3);
  CHECK_EQ(table.cached_pages(), 5);
  CHECK_EQ(table.match("", text.data(), 16).blocks, 8);
  CHECK_EQ(table.match("", text.data(), 10).blocks, 5);
  // Somebody takes 3 pages: the one that was free, and blocks 1 and 2.
  CHECK(table.reserve(1, 6));
  table.check_integrity();
  CHECK_EQ(table.reuse_stats().evicted_pages, 2);
  CHECK_EQ(table.match("", text.data(), 4).blocks, 1);
  CHECK_EQ(table.match("", text.data(), 8).blocks, 1);   // behind block 4 a row sees 2..4
  CHECK_EQ(table.match("", text.data(), 10).blocks, 5);  // behind block 5: 3 and 4
  CHECK_EQ(table.match("", text.data(), 10).pages, 3);
  CHECK_EQ(table.match("", text.data(), 10).unused, 2);
  CHECK_EQ(table.match("", text.data(), 16).blocks, 8);
  table.release(1);
  table.open(1, "");
  CHECK_EQ(table.attach(1, text.data(), 16), 8);
  CHECK_EQ(table.held(1), 3);
  for (int block = 1; block < 6; ++block) CHECK_EQ(table.pages(1)[block], kGone);
  CHECK_EQ(table.pages(1)[0], table.pages(0)[0]);
  CHECK_EQ(table.pages(1)[7], table.pages(0)[7]);
  table.check_integrity();
  table.release(0);
  table.release(1);
  // Nobody holds the text; without its sink tokens nothing of it can be used.
  PageTable lost(4, 2, 2, 16, true, 64, {4, 2});
  read_all(lost, 0, counting(8));
  lost.release(0);
  CHECK_EQ(lost.match("", text.data(), 8).blocks, 4);
  CHECK(lost.reserve(1, 8));
  CHECK_EQ(lost.match("", text.data(), 8).blocks, 0);
  lost.check_integrity();
}

TEST(window_publishes_behind_blocks_that_were_given_back) {
  PageTable table(8, 2, 2, 16, true, 64, {2, 0});
  const std::vector<TokenId> text = counting(12);
  table.open(0, "");
  for (int count = 2; count <= 12; count += 2) {  // read in chunks, published at the end
    CHECK(table.reserve(0, count));
    table.commit(0, count);
    table.trim(0, count);
  }
  CHECK_EQ(table.held(0), 1);
  table.publish(0, text.data(), 12);
  table.check_integrity();
  CHECK_EQ(table.reuse_stats().published_pages, 1);
  CHECK_EQ(table.match("", text.data(), 12).blocks, 6);
  CHECK_EQ(table.match("", text.data(), 10).blocks, 0);
  // Another reads all of it and gives the nodes their pages.
  read_all(table, 1, counting(10));
  CHECK_EQ(table.match("", text.data(), 10).blocks, 5);
  table.release(0);
  table.release(1);
  table.check_integrity();
  CHECK_EQ(table.drop_unused(), 6);
  CHECK_EQ(table.free_pages(), 8);
  table.check_integrity();
}

// Many slots at random. `content` says what each page holds: the text up to the end of its block.
struct RandomWorld {
  RandomWorld(std::uint32_t seed, AttentionSpan span_, bool reuse_, int page_size_)
      : rng(seed),
        span(span_),
        reuse(reuse_),
        page_size(page_size_),
        table(kPages, page_size_, kSlots, kBlocks + 2, reuse_, seed % 3 == 0 ? 2 : 64, span_),
        content(kPages),
        slots(kSlots) {}

  static constexpr int kPages = 24, kSlots = 5, kBlocks = 12;
  struct Slot {
    bool open = false;
    std::string salt;
    std::vector<TokenId> text;
    std::int64_t trimmed = 0;
  };
  std::mt19937 rng;
  AttentionSpan span;
  bool reuse;
  int page_size;
  PageTable table;
  std::vector<std::string> content;
  std::vector<Slot> slots;
  std::int64_t operations = 0, attached = 0;

  int below(int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); }
  std::string holds(const Slot& s, int block) const {
    std::string key = s.salt + ":";
    for (int i = 0; i < (block + 1) * page_size; ++i) {
      key += i < static_cast<int>(s.text.size()) ? static_cast<char>('a' + s.text[i]) : '.';
    }
    return key;
  }
  bool seen(std::int64_t position, std::int64_t row) const {
    return span.window == 0 || position < span.sink_tokens || row - position < span.window;
  }

  // Everything that a row from `row` on sees of the slot's first `count` tokens is there.
  void check_visible(int slot, std::int64_t row, std::int64_t count) {
    const Slot& s = slots[slot];
    for (std::int64_t p = 0; p < count; ++p) {
      if (!seen(p, row)) continue;
      const int block = static_cast<int>(p / page_size);
      const std::int32_t page = table.pages(slot)[block];
      CHECK(page != kGone);
      if ((block + 1) * page_size <= count) CHECK_EQ(content[page], holds(s, block));
    }
  }

  void start(int slot) {
    Slot& s = slots[slot];
    s.open = true;
    s.salt = std::string(1, static_cast<char>('A' + below(2)));
    s.text.clear();
    s.trimmed = 0;
    // Texts that begin alike and part somewhere.
    const int shared = below(kBlocks * page_size), length = below(kBlocks * page_size) + 1;
    for (int i = 0; i < length; ++i) s.text.push_back(i < shared ? i % 5 : below(3));
    table.open(slot, s.salt);
    const int blocks = table.match(s.salt, s.text.data(), length - 1).blocks;
    CHECK_EQ(table.attach(slot, s.text.data(), length - 1), blocks);
    attached += blocks;
    check_visible(slot, table.length(slot), table.length(slot));
  }

  void go_on(int slot) {
    Slot& s = slots[slot];
    const std::int64_t from = table.length(slot);
    const auto to = std::min<std::int64_t>(static_cast<std::int64_t>(s.text.size()),
                                           from + 1 + below(2 * page_size));
    if (!table.reserve(slot, to + below(3))) return;
    check_visible(slot, from, from);
    for (std::int64_t p = from; p < to; ++p) {  // writes K/V: no published page is touched
      CHECK(p >= table.shared_tokens(slot));
      const int block = static_cast<int>(p / page_size);
      content[table.pages(slot)[block]] = holds(s, block);
    }
    table.commit(slot, to);
  }

  void step() {
    const int slot = below(kSlots);
    Slot& s = slots[slot];
    ++operations;
    if (!s.open) return start(slot);
    const std::int64_t length = table.length(slot);
    switch (below(8)) {
      case 0:
        table.release(slot);
        s.open = false;
        break;
      case 1:
        table.rewind(slot);
        break;
      case 2:
      case 3:
        s.trimmed = std::max(s.trimmed, length - below(page_size + 1));
        table.trim(slot, std::max<std::int64_t>(0, s.trimmed));
        break;
      case 4:
        table.publish(slot, s.text.data(), length, below(2) == 0);
        break;
      default:
        go_on(slot);
    }
  }

  // At the end nothing is missing.
  void finish() {
    for (int slot = 0; slot < kSlots; ++slot) table.release(slot);
    table.drop_unused();
    table.check_integrity();
    CHECK_EQ(table.free_pages(), kPages);
    CHECK_EQ(table.cached_pages(), 0);
  }
};

// 1,000,000 page operations: nothing leaks, and no row ever misses a page or sees another text's.
TEST(window_random_operations) {
  std::int64_t operations = 0, attached = 0;
  std::uint32_t seed = 1;
  for (const AttentionSpan span :
       {AttentionSpan{}, AttentionSpan{1, 0}, AttentionSpan{5, 0}, AttentionSpan{9, 3},
        AttentionSpan{2, 17}, AttentionSpan{1000, 4}}) {
    for (const bool reuse : {false, true}) {
      for (const int page_size : {1, 4}) {
        RandomWorld world(++seed, span, reuse, page_size);
        for (int i = 0; i < 42000; ++i) {
          world.step();
          if (i % 16 == 0) world.table.check_integrity();
        }
        world.finish();
        operations += world.operations;
        attached += world.attached;
        CHECK_EQ(world.attached > 500, reuse);
      }
    }
  }
  CHECK(operations >= 1000000);
}

}  // namespace
}  // namespace specdec
