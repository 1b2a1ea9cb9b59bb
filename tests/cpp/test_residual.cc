// Residual laws: the same bits for teams of any size, and the arithmetic of the definition.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "algo/residual.h"
#include "check.h"
#include "thread_team.h"

namespace specdec {
namespace {

using testing::ThreadTeam;

struct ResidualCase {
  std::vector<float> weights, probs;
  std::vector<TokenId> ids;  // empty: all
  double mass = 0.0;
  int vocab() const { return static_cast<int>(weights.size()); }
  DraftLaw draft(int column) const {
    return {probs.data(), ids.empty() ? nullptr : ids.data(),
            static_cast<std::int32_t>(probs.size()), column, mass};
  }
};

ResidualCase make_case(int vocab, bool reduced, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> unit(0.0f, 1.0f);
  ResidualCase c;
  for (int v = 0; v < vocab; ++v)
    c.weights.push_back(unit(random) < 0.3f ? 0.0f : to_grid(unit(random)));
  c.weights[random() % vocab] = 1.0f;
  const int columns = reduced ? std::max(1, vocab / 3) : vocab;
  if (reduced) {
    for (int v = 0; v < vocab; ++v) c.ids.push_back(v);
    std::shuffle(c.ids.begin(), c.ids.end(), random);
    c.ids.resize(columns);
  }
  for (int i = 0; i < columns; ++i) c.probs.push_back(unit(random));
  for (const float p : c.probs) c.mass += static_cast<double>(p);
  return c;
}

struct Result {
  std::vector<float> weights;
  Mass total;
  std::vector<TokenId> drawn;
};

Result subtract(const ResidualCase& c, int ranks) {
  Result result{c.weights, 0, {}};
  std::vector<Mass> mass(mass_blocks(c.vocab()));
  auto work = [&](const auto& team) {
    WeightedLaw law{result.weights.data(), mass.data(), c.vocab(), 0};
    sum_law(team, &law);
    subtract_draft(team, c.draft(0), draft_mass(c.draft(0), nullptr, 0), &law);
    team.sync();
    if (team.rank() != 0) return;
    result.total = law.total;
    for (double u = 0.0; u < 1.0; u += 0.01) result.drawn.push_back(draw_from_law(law, u));
  };
  if (ranks == 1) {
    work(SerialTeam{});
  } else {
    ThreadTeam::run(ranks, [&](const ThreadTeam& team) { work(team); });
  }
  return result;
}

TEST(residual_is_max_of_r_minus_q_and_zero) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    const int vocab = 1 + static_cast<int>(seed * 17 % 300);
    const ResidualCase c = make_case(vocab, seed % 2 == 1, seed);
    const Result result = subtract(c, 1);
    double total = 0.0, left = 0.0;
    for (const float w : c.weights) total += static_cast<double>(w);
    std::vector<double> q(vocab);
    for (std::size_t i = 0; i < c.probs.size(); ++i) {
      q[c.ids.empty() ? i : c.ids[i]] = static_cast<double>(c.probs[i]) / c.mass;
    }
    for (int v = 0; v < vocab; ++v) {
      const double r = std::max(0.0, static_cast<double>(c.weights[v]) / total - q[v]);
      CHECK(std::abs(static_cast<double>(result.weights[v]) / total - r) < 1e-6);
      left += static_cast<double>(result.weights[v]);
    }
    CHECK_EQ(left, weight_of(result.total));
    for (const TokenId token : result.drawn) {
      CHECK(result.total > 0 ? result.weights[token] > 0.0f : token == -1);
    }
  }
}

TEST(residual_has_the_same_bits_for_every_team) {
  for (unsigned seed = 0; seed < 6; ++seed) {
    const ResidualCase c = make_case(64 + static_cast<int>(seed * 71), seed % 2 == 1, seed);
    const Result one = subtract(c, 1);
    for (const int ranks : {2, 5, 32}) {
      const Result many = subtract(c, ranks);
      CHECK(many.weights == one.weights);
      CHECK_EQ(many.total, one.total);
      CHECK(many.drawn == one.drawn);
    }
  }
}

TEST(earlier_siblings_leave_the_draft_law) {
  const std::vector<float> probs = {0.5f, 0.25f, 0.25f};
  const DraftLaw q{probs.data(), nullptr, 3, 1, 1.0};
  const EarlierSibling earlier[] = {{0, 0}, {2, 2}};
  CHECK_EQ(draft_mass(q, earlier, 0), 1.0);
  CHECK_EQ(draft_mass(q, earlier, 1), 0.5);
  CHECK_EQ(draft_mass(q, earlier, 2), 0.25);
  CHECK_EQ(draft_mass(DraftLaw{probs.data(), nullptr, 3, 1, 0.7}, earlier, 2), 0.25);
}

TEST(an_earlier_sibling_is_found_in_a_row_of_other_columns) {
  const std::vector<float> probs = {0.5f, 0.25f, 0.25f};
  const std::vector<TokenId> ids = {7, 3, 9};
  const DraftLaw q{probs.data(), ids.data(), 3, 1, 1.0};
  const EarlierSibling same[] = {{7, 0}};
  const EarlierSibling elsewhere[] = {{7, 2}};
  const EarlierSibling absent[] = {{5, 0}};
  CHECK_EQ(draft_mass(q, same, 1), 0.5);
  CHECK_EQ(draft_mass(q, elsewhere, 1), 0.5);
  CHECK_EQ(draft_mass(q, absent, 1), 1.0);
}

}  // namespace
}  // namespace specdec
