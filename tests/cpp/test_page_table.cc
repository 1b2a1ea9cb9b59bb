// Pages: against a model that only counts, through random sequences of operations.
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "kv/page_table.h"

namespace specdec {
namespace {

TEST(page_table_reserve_is_all_or_nothing) {
  PageTable table(4, 16, 2, 4);
  CHECK(table.reserve(0, 33));  // 3 pages
  CHECK_EQ(table.free_pages(), 1);
  CHECK(!table.reserve(1, 17));  // 2 pages: not there
  CHECK_EQ(table.free_pages(), 1);
  CHECK(table.pages(1).empty());
  CHECK(table.reserve(1, 16));
  CHECK_EQ(table.free_pages(), 0);
  CHECK(table.reserve(0, 48));  // has them already
  table.check_integrity();
}

TEST(page_table_rewind_returns_what_drafts_took) {
  PageTable table(8, 4, 1, 8);
  CHECK(table.reserve(0, 20));
  table.commit(0, 9);
  const std::vector<std::int32_t> kept(table.pages(0).begin(), table.pages(0).begin() + 3);
  table.rewind(0);
  CHECK_EQ(table.pages(0), kept);
  CHECK_EQ(table.free_pages(), 5);
  table.release(0);
  CHECK_EQ(table.free_pages(), 8);
  CHECK_EQ(table.length(0), 0);
  table.check_integrity();
}

TEST(page_table_refusals) {
  CHECK_THROWS(PageTable(0, 16, 1, 1), std::invalid_argument, "num_pages = 0");
  for (const int size : {0, 3, 256}) {
    CHECK_THROWS(PageTable(4, size, 1, 1), std::invalid_argument,
                 "tokens_per_block = " + std::to_string(size));
  }
  PageTable table(4, 16, 1, 2);
  CHECK_THROWS(table.reserve(0, 33), std::logic_error, "wants 3 pages, its table has 2");
  CHECK_THROWS(table.commit(0, 1), std::logic_error, "commits 1 tokens in 0 pages");
  CHECK_THROWS(table.commit(0, -1), std::logic_error, "commits -1 tokens");
}

TEST(page_table_random_operations) {
  std::mt19937 rng(7);
  for (const int page_size : {1, 2, 16, 128}) {
    const int pages = 40, slots = 5, limit = 20;
    PageTable table(pages, page_size, slots, limit);
    std::vector<std::int64_t> length(slots, 0), held(slots, 0);
    for (int step = 0; step < 4000; ++step) {
      const int slot = static_cast<int>(rng() % slots);
      switch (rng() % 4) {
        case 0: {
          const std::int64_t tokens = static_cast<std::int64_t>(rng() % (limit * page_size + 1));
          const std::int64_t wanted = (tokens + page_size - 1) / page_size;
          const std::int64_t more = std::max<std::int64_t>(0, wanted - held[slot]);
          const bool fits = more <= table.free_pages();
          CHECK_EQ(table.reserve(slot, tokens), fits);
          if (fits) held[slot] += more;
          break;
        }
        case 1:
          length[slot] = static_cast<std::int64_t>(rng() % (held[slot] * page_size + 1));
          table.commit(slot, length[slot]);
          break;
        case 2:
          table.rewind(slot);
          held[slot] = (length[slot] + page_size - 1) / page_size;
          break;
        case 3:
          if (rng() % 4 == 0) {
            table.release(slot);
            held[slot] = length[slot] = 0;
          }
          break;
      }
      table.check_integrity();
      std::set<std::int32_t> seen;
      std::int64_t total = 0;
      for (int s = 0; s < slots; ++s) {
        CHECK_EQ(static_cast<std::int64_t>(table.pages(s).size()), held[s]);
        CHECK_EQ(table.length(s), length[s]);
        seen.insert(table.pages(s).begin(), table.pages(s).end());
        total += held[s];
      }
      CHECK_EQ(static_cast<std::int64_t>(seen.size()), total);
      CHECK_EQ(table.free_pages(), pages - total);
    }
  }
}

}  // namespace
}  // namespace specdec
