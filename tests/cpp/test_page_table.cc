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

PageTable reuse_table(int num_pages, int page_size, int hash_bits = 64) {
  return PageTable(num_pages, page_size, 4, 16, true, hash_bits);
}

// A request that reads `text`, publishes it and ends.
void pass_through(PageTable& table, int slot, const std::string& salt,
                  const std::vector<TokenId>& text) {
  const auto count = static_cast<std::int64_t>(text.size());
  table.open(slot, salt);
  table.attach(slot, text.data(), count);
  CHECK(table.reserve(slot, count));
  table.commit(slot, count);
  table.publish(slot, text.data(), count);
  table.check_integrity();
  table.release(slot);
  table.check_integrity();
}

TEST(prefix_reuse_finds_full_blocks_of_the_same_salt) {
  PageTable table = reuse_table(16, 2);
  const std::vector<TokenId> text = {1, 2, 3, 4, 5};
  pass_through(table, 0, "a", text);
  CHECK_EQ(table.free_pages(), 16);
  CHECK_EQ(table.cached_pages(), 2);
  CHECK_EQ(table.match("a", text.data(), 5).pages, 2);
  CHECK_EQ(table.match("a", text.data(), 3).pages, 1);
  CHECK_EQ(table.match("a", text.data(), 1).pages, 0);
  CHECK_EQ(table.match("b", text.data(), 5).pages, 0);
  table.open(1, "a");
  CHECK_EQ(table.attach(1, text.data(), 5), 2);
  CHECK_EQ(table.length(1), 4);
  CHECK_EQ(table.match("a", text.data(), 5).unused, 0);
  CHECK_EQ(table.free_pages(), 14);
  CHECK_THROWS(table.commit(1, 3), std::logic_error, "commits 3 tokens, 4 are published");
}

TEST(prefix_reuse_compares_tokens_not_hashes) {
  for (const int hash_bits : {0, 1, 64}) {
    PageTable table = reuse_table(64, 1, hash_bits);
    for (TokenId first = 0; first < 4; ++first) {
      for (TokenId second = 0; second < 4; second += 2) pass_through(table, 0, "", {first, second});
    }
    for (TokenId first = 0; first < 4; ++first) {
      for (TokenId second = 0; second < 4; ++second) {
        const TokenId text[] = {first, second};
        CHECK_EQ(table.match("", text, 2).pages, second % 2 == 0 ? 2 : 1);
      }
    }
  }
}

TEST(prefix_reuse_evicts_the_longest_unused_leaf) {
  PageTable table = reuse_table(4, 1);
  pass_through(table, 0, "", {1, 2});
  pass_through(table, 0, "", {3, 4});
  pass_through(table, 0, "", {1, 2});
  const TokenId recent[] = {1, 2}, old[] = {3, 4};
  table.open(1, "");
  CHECK(table.reserve(1, 1));
  CHECK_EQ(table.match("", old, 2).pages, 1);
  CHECK(table.reserve(1, 3));
  CHECK_EQ(table.match("", old, 2).pages, 0);
  CHECK_EQ(table.match("", recent, 2).pages, 1);
  CHECK(!table.reserve(1, 5));
  CHECK(table.reserve(1, 4));
  CHECK_EQ(table.match("", recent, 2).pages, 0);
  CHECK_EQ(table.reuse_stats().evicted_pages, 4);
  table.check_integrity();
}

TEST(prefix_reuse_keeps_one_copy) {
  PageTable table = reuse_table(8, 2);
  const TokenId text[] = {1, 2, 3, 4};
  for (const int slot : {0, 1}) {
    table.open(slot, "");
    CHECK(table.reserve(slot, 4));
    table.commit(slot, 4);
  }
  table.publish(0, text, 4);
  table.publish(1, text, 4);
  table.check_integrity();
  CHECK_EQ(table.pages(0), table.pages(1));
  CHECK_EQ(table.free_pages(), 6);
  table.release(0);
  CHECK_EQ(table.cached_pages(), 0);
  table.release(1);
  CHECK_EQ(table.cached_pages(), 2);
  CHECK_EQ(table.drop_unused(), 2);
  CHECK_EQ(table.cached_pages(), 0);
  table.check_integrity();
}

TEST(without_swap_a_slot_keeps_its_pages) {
  PageTable table = reuse_table(8, 2);
  const TokenId text[] = {1, 2, 3, 4};
  for (const int slot : {0, 1}) {
    table.open(slot, "");
    CHECK(table.reserve(slot, 4));
    table.commit(slot, 4);
  }
  table.publish(0, text, 2, false);
  const std::vector<std::int32_t> before = table.pages(1);
  table.publish(1, text, 4, false);  // its first block is there: nothing of it is published
  table.check_integrity();
  CHECK_EQ(table.pages(1), before);
  CHECK_EQ(table.shared_tokens(1), 0);
  table.publish(0, text, 4, false);
  CHECK_EQ(table.shared_tokens(0), 4);
  table.release(1);
  CHECK_EQ(table.cached_pages(), 0);
  CHECK_EQ(table.free_pages(), 6);
  table.release(0);
  CHECK_EQ(table.cached_pages(), 2);
  table.check_integrity();
}

}  // namespace
}  // namespace specdec
