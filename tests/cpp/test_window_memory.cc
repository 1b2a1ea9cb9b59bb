// Memory that layers with narrow windows leave behind: against what a row may see, at random, and
// on memory of the operating system.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "base/zeroed_memory.h"
#include "check.h"
#include "engine/window_memory.h"
#include "kv/page_table.h"

namespace specdec {
namespace {

constexpr int kPages = 24, kSlots = 4, kPageSize = 4;

// What each window still has of each page, by what it was told; a page has all when it is taken.
struct Watched {
  std::vector<int> windows;
  std::int64_t sinks;
  PageTable table;
  std::vector<std::vector<bool>> has;
  std::int64_t left = 0;

  Watched(std::vector<int> windows_, std::int64_t sinks_, AttentionSpan span)
      : windows(windows_),
        sinks(sinks_),
        table(kPages, kPageSize, kSlots, 16, false, 64, span),
        has(windows.size(), std::vector<bool>(kPages)) {
    NarrowWindows narrow{windows_, std::vector<int>(windows_.size(), kPages), sinks_};
    table.narrow(narrow, [this](int window, std::int32_t page) {
      CHECK(has[window][page]);  // told once
      has[window][page] = false;
      ++left;
    });
  }

  bool reserve(int slot, std::int64_t tokens) {
    const std::size_t before = table.pages(slot).size();
    if (!table.reserve(slot, tokens)) return false;
    table.cover(slot, table.length(slot), tokens);
    for (std::size_t b = before; b < table.pages(slot).size(); ++b) {
      for (auto& window : has) {
        CHECK(!window[table.pages(slot)[b]]);  // it was left, or never taken
        window[table.pages(slot)[b]] = true;
      }
    }
    return true;
  }

  // From `row` on nobody looks at what was left; and what nobody looks at was left.
  void check(int slot, std::int64_t row) const {
    for (std::size_t i = 0; i < windows.size(); ++i) {
      for (std::size_t b = 0; b < table.pages(slot).size(); ++b) {
        const std::int32_t page = table.pages(slot)[b];
        if (page == PageTable::kNoPage) continue;
        const auto first = static_cast<std::int64_t>(b) * kPageSize;
        const bool seen = first < sinks || first + kPageSize > row - windows[i] + 1;
        CHECK_EQ(static_cast<bool>(has[i][page]), seen);
      }
    }
  }
};

TEST(window_memory_is_left_when_no_row_sees_it) {
  // The second has a span of its own, within which pages go for all layers.
  for (const auto& [sinks, span] : {std::pair{0, AttentionSpan{}}, std::pair{5, AttentionSpan{}},
                                    std::pair{3, AttentionSpan{20, 3}}}) {
    Watched world({1, 6, 11}, sinks, span);
    std::mt19937 rng(7);
    const auto below = [&](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
    std::vector<std::int64_t> row(kSlots);
    for (int i = 0; i < 20000; ++i) {
      const int slot = below(kSlots);
      const std::int64_t length = world.table.length(slot);
      switch (below(8)) {
        case 0:
          world.table.release(slot);
          row[slot] = 0;
          break;
        case 1:
          world.table.rewind(slot);
          break;
        case 2:
        case 3:
          row[slot] = std::max<std::int64_t>(row[slot], length - below(kPageSize + 1));
          world.table.trim(slot, row[slot]);
          world.check(slot, row[slot]);
          break;
        default: {
          const std::int64_t to = std::min<std::int64_t>(60, length + below(9));
          if (world.reserve(slot, to)) world.table.commit(slot, to);
        }
      }
      if (i % 16 == 0) world.table.check_integrity();
    }
    for (int slot = 0; slot < kSlots; ++slot) world.table.release(slot);
    for (const auto& window : world.has)
      CHECK_EQ(std::count(window.begin(), window.end(), true), 0);
    CHECK(world.left > 1000);
  }
}

TEST(window_memory_goes_back_to_the_system) {
  const auto unit = static_cast<std::int64_t>(ZeroedMemory::unit());
  // Three layers, four pages, whose parts are one page of the system each.
  constexpr int kLayers = 3;
  KvCacheView cache;
  cache.dtype = DType::kF32;
  cache.num_layers = kLayers;
  cache.num_pages = 4;
  cache.stride_page = unit / 4;
  cache.stride_layer = 4 * cache.stride_page;
  ZeroedMemory k(kLayers * 4 * unit), v(kLayers * 4 * unit);
  cache.k = k.data();
  cache.v = v.data();
  std::memset(k.data(), 1, k.bytes());
  std::memset(v.data(), 2, v.bytes());
  CHECK_EQ(k.resident_bytes(), k.bytes());
  const WindowMemory memory(cache, {8, 0, 8});
  CHECK_EQ(memory.num_groups(), 1);
  memory.leave(0, 2);
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int page = 0; page < 4; ++page) {
      const bool left = page == 2 && layer != 1;
      const std::int64_t at = (layer * 4 + page) * unit;
      for (const std::int64_t byte : {at, at + unit - 1}) {
        CHECK_EQ(static_cast<int>(k.data()[byte]), left ? 0 : 1);
        CHECK_EQ(static_cast<int>(v.data()[byte]), left ? 0 : 2);
      }
    }
  }
  memory.leave(0, 2);
  CHECK_EQ(WindowMemory(cache, {4, 0, 2}).num_groups(), 2);
}

TEST(window_memory_refuses_what_it_cannot_give_back) {
  ZeroedMemory k(1 << 16);
  KvCacheView cache;
  cache.dtype = DType::kF32;
  cache.num_layers = 2;
  cache.k = cache.v = k.data();
  cache.stride_page = static_cast<std::int64_t>(ZeroedMemory::unit()) / 4;
  CHECK_THROWS(WindowMemory(cache, {1}), std::invalid_argument,
               "has 1 entries, needs one per layer: 2");
  CHECK_THROWS(WindowMemory(cache, {1, -1}), std::invalid_argument, "holds -1");
  cache.v = k.data() + 8;
  CHECK_THROWS(WindowMemory(cache, {1, 0}), std::invalid_argument, "no whole pages");
  cache.v = cache.k;
  cache.stride_page /= 2;
  CHECK_THROWS(WindowMemory(cache, {1, 0}), std::invalid_argument, "no whole pages");
}

}  // namespace
}  // namespace specdec
