// NeededRows: the rows that scores depend on, as a step of their own.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "backend/cpu/decoder/needed_rows.h"
#include "check.h"

namespace specdec::cpu {
namespace needed_rows_test {

// A step of random requests. Every row is marked in its mask, and where it lies in memory.
struct Step {
  std::vector<std::int32_t> cu_rows{0}, kv_len, logit_rows;
  std::vector<std::uint8_t> is_tree;
  std::vector<std::uint32_t> mask;
  StepView view;

  Step(std::mt19937& random, double scored) {
    const int requests = std::uniform_int_distribution<>(1, 6)(random);
    for (int b = 0; b < requests; ++b) {
      const int rows = std::uniform_int_distribution<>(1, 30)(random);
      is_tree.push_back(random() % 3 == 0);
      kv_len.push_back(static_cast<std::int32_t>(random() % 100));
      // Some requests have no scores, some the last row's, some any.
      const auto kind = random() % 3;
      for (int i = 0; i < rows; ++i) {
        const bool any = std::bernoulli_distribution(scored)(random);
        const std::int32_t row = cu_rows.back() + i;
        if (kind == 1 ? i + 1 == rows : kind == 2 && any) logit_rows.push_back(row);
        for (int word = 0; word < kMaskWords; ++word) {
          mask.push_back(static_cast<std::uint32_t>(row * kMaskWords + word));
        }
      }
      cu_rows.push_back(cu_rows.back() + rows);
    }
    view.num_requests = requests;
    view.num_rows = cu_rows.back();
    view.cu_rows = cu_rows.data();
    view.kv_len = kv_len.data();
    view.is_tree = is_tree.data();
    view.mask = mask.data();
    view.logit_rows = logit_rows.data();
    view.num_logit_rows = static_cast<std::int32_t>(logit_rows.size());
  }
};

// The rows of a request that are kept, one by one.
std::vector<std::int32_t> kept_rows(const Step& step, int b) {
  const auto has_scores = [&](std::int32_t row) {
    return std::count(step.logit_rows.begin(), step.logit_rows.end(), row) > 0;
  };
  std::vector<std::int32_t> scored, kept;
  for (std::int32_t row = step.cu_rows[b]; row < step.cu_rows[b + 1]; ++row) {
    if (has_scores(row)) scored.push_back(row);
  }
  for (std::int32_t row = step.cu_rows[b]; row < step.cu_rows[b + 1] && !scored.empty(); ++row) {
    if (step.is_tree[b] != 0 || (row >= scored.front() && row <= scored.back())) {
      kept.push_back(row);
    }
  }
  return kept;
}

TEST(needed_rows_are_a_step_of_their_own) {
  std::mt19937 random(5);
  NeededRows needed;
  int found = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const Step step(random, trial % 2 == 0 ? 0.05 : 0.5);
    std::vector<std::int32_t> all;
    for (int b = 0; b < step.view.num_requests; ++b) {
      for (const std::int32_t row : kept_rows(step, b)) all.push_back(row);
    }
    const bool few = 2 * static_cast<int>(all.size()) <= step.view.num_rows;
    CHECK(needed.find(step.view) == few);
    if (!few) continue;
    ++found;
    const StepView& left = needed.step();
    CHECK(left.num_rows == static_cast<std::int32_t>(all.size()));
    CHECK(left.num_requests == step.view.num_requests);
    CHECK(left.cu_rows[left.num_requests] == left.num_rows);
    for (int b = 0; b < left.num_requests; ++b) {
      const std::vector<std::int32_t> kept = kept_rows(step, b);
      CHECK(left.cu_rows[b + 1] - left.cu_rows[b] == static_cast<std::int32_t>(kept.size()));
      if (kept.empty()) continue;
      CHECK(left.kv_len[b] == step.kv_len[b] + kept.front() - step.cu_rows[b]);
      for (std::size_t i = 0; step.is_tree[b] != 0 && i < kept.size(); ++i) {
        CHECK(std::memcmp(left.mask + (left.cu_rows[b] + i) * kMaskWords,
                          step.mask.data() + kept[i] * kMaskWords,
                          kMaskWords * sizeof(std::uint32_t)) == 0);
      }
    }
    CHECK(left.num_logit_rows == step.view.num_logit_rows);
    for (std::int32_t i = 0; i < left.num_logit_rows; ++i) {
      CHECK(all[left.logit_rows[i]] == step.logit_rows[i]);
    }

    // Rows of 12 bytes, of which 7 move.
    std::vector<std::byte> rows(static_cast<std::size_t>(step.view.num_rows) * 12);
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::byte>(i * 7 % 251);
    const std::vector<std::byte> before = rows;
    needed.move_to_front(rows.data(), 12, 7);
    for (std::size_t i = 0; i < all.size(); ++i) {
      CHECK(std::memcmp(&rows[i * 12], &before[all[i] * 12], 7) == 0);
    }
  }
  CHECK(found > 500 && found < 1900);
}

}  // namespace needed_rows_test
}  // namespace specdec::cpu
