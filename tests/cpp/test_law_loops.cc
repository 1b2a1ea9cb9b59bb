// Loops over rows of scores: the same numbers for all vectors that this processor has, and those
// of the definitions, element by element.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "algo/law_loops.h"
#include "algo/residual.h"
#include "check.h"

namespace specdec {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLeast = static_cast<float>(kMassUnit);

// Scores at a place that is aligned to no vector, with forbidden tokens and both zeros.
std::vector<float> make_row(int n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, seed % 2 == 0 ? 3.0f : 12.0f);
  std::vector<float> row(static_cast<std::size_t>(n) + 1);
  for (float& score : row) {
    score = random() % 11 == 0 ? -kInfinity : normal(random);
    if (random() % 17 == 0) score = random() % 2 == 0 ? 0.0f : -0.0f;
  }
  return row;
}

const std::vector<int> kSizes = {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 1000, 4096, 4097, 49152};

TEST(the_largest_score_is_found_and_so_is_a_nan) {
  for (int which = 0; which < num_law_loops(); ++which) {
    const LawLoops& loops = law_loops_at(which);
    for (const int n : kSizes) {
      std::vector<float> row = make_row(n, static_cast<unsigned>(n));
      float* const scores = row.data() + 1;
      CHECK_EQ(loops.largest(scores, n), *std::max_element(scores, scores + n));
      for (const int at : {0, n / 2, n - 1}) {
        const float before = scores[at];
        scores[at] = kInfinity;
        CHECK_EQ(loops.largest(scores, n), kInfinity);
        scores[at] = kNan;
        CHECK(std::isnan(loops.largest(scores, n)));
        scores[at] = before;
      }
      std::fill(row.begin(), row.end(), -kInfinity);
      CHECK_EQ(loops.largest(scores, n), -kInfinity);
    }
  }
}

TEST(weights_masses_and_blocks_are_those_of_the_definition) {
  for (int which = 0; which < num_law_loops(); ++which) {
    const LawLoops& loops = law_loops_at(which);
    for (const int n : kSizes) {
      for (const float temperature : {1e-30f, 0.05f, 0.7f, 1.0f, 40.0f}) {
        const std::vector<float> row = make_row(n, static_cast<unsigned>(n) + 1);
        const float* const scores = row.data() + 1;
        const float best = *std::max_element(scores, scores + n), inverse = 1.0f / temperature;
        if (best == -kInfinity) continue;
        const float floor = n % 2 == 0 ? kLeast : 0.03f;
        // One element more than is written, to see that it is not.
        std::vector<float> weights(static_cast<std::size_t>(n) + 1, -7.0f);
        const int blocks = mass_blocks(n);
        std::vector<Mass> mass(static_cast<std::size_t>(blocks) + 1, 77);
        std::vector<float> block_best(static_cast<std::size_t>(blocks) + 1, -7.0f);
        const std::int32_t kept = loops.weigh(scores, n, best, inverse, floor, weights.data(),
                                              mass.data(), block_best.data());
        int expected_kept = 0;
        std::vector<Mass> expected_mass(blocks, 0);
        std::vector<float> expected_best(blocks, -kInfinity);
        for (int i = 0; i < n; ++i) {
          const float weight = to_grid(softmax_weight(law_exponent(scores[i], best, inverse)));
          CHECK(std::memcmp(&weight, &weights[i], sizeof(weight)) == 0);
          expected_kept += weight > 0.0f && weight >= floor;
          expected_mass[i / kMassBlock] += mass_of(weight);
          expected_best[i / kMassBlock] = std::max(expected_best[i / kMassBlock], scores[i]);
        }
        CHECK_EQ(kept, expected_kept);
        for (int b = 0; b < blocks; ++b) {
          CHECK_EQ(mass[b], expected_mass[b]);
          CHECK_EQ(block_best[b], expected_best[b]);
        }
        CHECK_EQ(weights[n], -7.0f);
        CHECK_EQ(mass[blocks], Mass{77});
        CHECK_EQ(block_best[blocks], -7.0f);
      }
    }
  }
}

TEST(sums_by_size_are_near_the_exact_ones) {
  for (int which = 0; which < num_law_loops(); ++which) {
    const LawLoops& loops = law_loops_at(which);
    for (const int n : kSizes) {
      std::vector<float> row = make_row(n, 4);
      for (float& x : row) x = to_grid(softmax_weight(std::min(-std::abs(x), 0.0f)));
      const float* const weights = row.data() + 1;
      double sums[kMassSteps];
      loops.sum_by_size(weights, n, sums);
      for (int step = 0; step < kMassSteps; ++step) {
        double expected = 0.0;
        for (int i = 0; i < n; ++i) {
          if (weights[i] >= std::ldexp(1.0f, -2 * (step + 1))) {
            expected += static_cast<double>(weights[i]);
          }
        }
        CHECK(std::abs(sums[step] - expected) <= 5e-5 * expected);
      }
    }
  }
}

}  // namespace
}  // namespace specdec
