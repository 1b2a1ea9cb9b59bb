// Pages in the host's pool, against K/V that is a function of text and place: whatever was taken
// from a slot and given back, with every page poisoned as soon as nobody holds it.
#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "check.h"
#include "kv/host_pages.h"
#include "kv/page_table.h"

namespace specdec {
namespace {

constexpr std::int64_t kPoison = -1;

TEST(host_pages_keep_is_all_or_nothing) {
  HostPages pool(3, 2);
  CHECK(pool.keep(0, {7, 8, 9}, /*first=*/1));
  CHECK_EQ(pool.free_pages(), 1);
  CHECK_EQ(pool.pages(0)[0], HostPages::kNoPage);
  CHECK(!pool.keep(1, {4, 5}, 0));
  CHECK(pool.pages(1).empty());
  CHECK_EQ(pool.free_pages(), 1);
  CHECK(pool.keep(1, {4, HostPages::kNoPage}, 0));  // a block behind a window has no page
  CHECK_EQ(pool.free_pages(), 0);
  CHECK_THROWS(pool.keep(0, {1}, 0), std::logic_error, "slot 0 keeps 3 blocks already");
  pool.drop(0);
  pool.drop(0);  // what keeps nothing drops nothing
  CHECK_EQ(pool.free_pages(), 2);
  pool.check_integrity();
  CHECK_THROWS(HostPages(-1, 1), std::invalid_argument, "num_host_pages = -1");
}

TEST(page_table_restore_is_all_or_nothing) {
  PageTable table(6, 4, 2, 6, false, 64, {/*window=*/4, /*sink_tokens=*/4});
  CHECK(table.reserve(0, 12));
  CHECK(!table.restore(1, 17, 0));  // 5 pages, 3 are free
  CHECK_EQ(table.free_pages(), 3);
  CHECK(table.pages(1).empty());
  CHECK(table.restore(1, 17, /*kept_from=*/3));  // block 0 is the sink's, 1 and 2 are gone
  CHECK_EQ(table.pages(1)[1], PageTable::kNoPage);
  CHECK_EQ(table.pages(1)[2], PageTable::kNoPage);
  CHECK_EQ(table.held(1), 3);
  CHECK_EQ(table.length(1), 17);
  table.check_integrity();
  CHECK_THROWS(table.restore(0, 12, 0), std::logic_error, "slot 0 holds 3 pages");
}

// A pool, the host's pool, and slots with texts that are theirs alone.
struct HostWorld {
  struct Slot {
    std::vector<TokenId> text;  // committed
    int kept_from = 0;
    std::optional<std::int64_t> swapped;  // its length; it holds no page
    int first = 0;                        // blocks before it were not copied
  };

  HostWorld(std::uint32_t seed, int page_size, AttentionSpan span, bool reuse)
      : random(seed),
        table(30, page_size, 5, 16, reuse, 64, span),
        pool(20, 5),
        size(page_size),
        pages(30 * page_size, kPoison),
        copies(20 * page_size, kPoison),
        slots(5) {}

  // What K/V of a token depends on: everything up to it.
  static std::int64_t value(const std::vector<TokenId>& text, std::int64_t at) {
    std::int64_t sum = 17;
    for (std::int64_t i = 0; i <= at; ++i) sum = (sum * 31 + text[i] + 1) % 1000003;
    return sum;
  }

  void poison_free() {
    std::vector<std::uint8_t> held(30, 0);
    for (int s = 0; s < 5; ++s) {
      for (const std::int32_t page : table.pages(s)) {
        if (page != PageTable::kNoPage) held[page] = 1;
      }
    }
    for (int page = 0; page < 30 && !table.reuse(); ++page) {
      if (!held[page]) std::fill_n(pages.begin() + page * size, size, kPoison);
    }
  }

  // More tokens, as far as there are pages.
  void grow(int s) {
    Slot& slot = slots[s];
    const std::int64_t before = static_cast<std::int64_t>(slot.text.size());
    const std::int64_t length = std::min<std::int64_t>(before + random() % (3 * size), 16 * size);
    if (!table.reserve(s, length)) return;
    for (std::int64_t at = before; at < length; ++at) {
      slot.text.push_back(static_cast<TokenId>(random() % 2));
      pages[table.pages(s)[at / size] * size + at % size] = value(slot.text, at);
    }
    table.commit(s, length);
    if (table.reuse()) table.publish(s, slot.text.data(), length);
    if (random() % 2 == 0 && length > 0) {
      table.trim(s, length - 1);
      slot.kept_from = table.kept_from(s);
    }
  }

  void swap_out(int s) {
    Slot& slot = slots[s];
    const std::int64_t length = table.length(s);
    const auto& held = table.pages(s);
    const std::vector<std::int32_t> run(held.begin(), held.begin() + table.pages_for(length));
    const int first = table.held_by_others(s);
    if (length == 0 || !pool.keep(s, run, first)) return;
    for (std::size_t b = first; b < run.size(); ++b) {
      if (run[b] == PageTable::kNoPage) continue;
      std::copy_n(pages.begin() + run[b] * size, size, copies.begin() + pool.pages(s)[b] * size);
    }
    table.release(s);
    slot.swapped = length;
    slot.first = first;
    ++swaps;
  }

  void swap_in(int s) {
    Slot& slot = slots[s];
    const TokenId* text = slot.text.data();
    if (table.match("", text, *slot.swapped).blocks < slot.first) return drop(s);
    table.open(s, "");
    const int attached = table.reuse() ? table.attach(s, text, *slot.swapped) : 0;
    if (!table.restore(s, *slot.swapped, slot.kept_from)) {
      table.release(s);
      return;
    }
    const auto& kept = pool.pages(s);
    for (std::size_t b = attached; b < kept.size(); ++b) {
      if (kept[b] == HostPages::kNoPage) continue;
      std::copy_n(copies.begin() + kept[b] * size, size, pages.begin() + table.pages(s)[b] * size);
      std::fill_n(copies.begin() + kept[b] * size, size, kPoison);
    }
    pool.drop(s);
    slot.swapped.reset();
    attached_back += attached;
  }

  void drop(int s) {
    table.release(s);
    pool.drop(s);
    slots[s] = {};
    if (table.reuse()) table.open(s, "");
  }

  // Tokens whose K/V is not what it should be.
  int wrong(int s) const {
    int found = 0;
    const Slot& slot = slots[s];
    for (std::int64_t at = 0; at < table.length(s); ++at) {
      const std::int32_t page = table.pages(s)[at / size];
      if (page == PageTable::kNoPage) continue;
      found += pages[page * size + at % size] != value(slot.text, at);
    }
    return found;
  }

  std::mt19937 random;
  PageTable table;
  HostPages pool;
  int size;
  std::vector<std::int64_t> pages, copies;
  std::vector<Slot> slots;
  int swaps = 0, attached_back = 0;
};

TEST(host_pages_random_operations) {
  int swaps = 0, attached = 0;
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const int size = 1 << (seed % 3);
    AttentionSpan span;
    if (seed % 4 == 1) span = {5, seed % 8 == 1 ? 3 : 0};
    HostWorld world(seed, size, span, /*reuse=*/seed % 4 >= 2);
    for (int s = 0; s < 5; ++s) world.drop(s);
    for (int step = 0; step < 1000; ++step) {
      const int s = static_cast<int>(world.random() % 5);
      const int what = static_cast<int>(world.random() % 10);
      if (world.slots[s].swapped) {
        what == 0 ? world.drop(s) : world.swap_in(s);
      } else if (what < 6) {
        world.grow(s);
      } else if (what < 9) {
        world.swap_out(s);
      } else {
        world.drop(s);
      }
      world.poison_free();
      world.table.check_integrity();
      world.pool.check_integrity();
      for (int each = 0; each < 5; ++each) CHECK_EQ(world.wrong(each), 0);
    }
    swaps += world.swaps;
    attached += world.attached_back;
    for (int s = 0; s < 5; ++s) world.drop(s);
    CHECK_EQ(world.pool.free_pages(), 20);
    CHECK_EQ(world.table.free_pages(), 30);
  }
  CHECK(swaps > 10000);
  CHECK(attached > 1000);
}

}  // namespace
}  // namespace specdec
