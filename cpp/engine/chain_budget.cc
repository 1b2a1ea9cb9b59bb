#include "engine/chain_budget.h"

#include <algorithm>
#include <queue>
#include <utility>

namespace specdec {

int ChainRates::match_bucket(int match_len) {
  if (match_len <= 3) return std::max(match_len, 1) - 1;
  if (match_len <= 5) return 3;
  return match_len <= 9 ? 4 : 5;
}

int ChainRates::depth_bucket(int depth) {
  if (depth <= 3) return depth - 1;
  if (depth <= 5) return 3;
  return depth <= 9 ? 4 : 5;
}

// A rough start (longer matches are right more often, and so is what follows a right token), soon
// outweighed by what is observed.
double ChainRates::prior(int match, int depth) {
  static constexpr double kFirst[kMatchBuckets] = {0.25, 0.40, 0.55, 0.70, 0.80, 0.90};
  return depth == 0 ? kFirst[match] : std::min(0.92, kFirst[match] + 0.25);
}

double ChainRates::rate(const ChainRates* shared, int match_len, int depth) const {
  constexpr double kPriorWeight = 4.0;
  const int m = match_bucket(match_len), d = depth_bucket(depth);
  double base = prior(m, d);
  if (shared != nullptr) {
    const Count& all = shared->counts_[m][d];
    base = (all.hits + kPriorWeight * base) / (all.tries + kPriorWeight);
  }
  const Count& own = counts_[m][d];
  return (own.hits + kPriorWeight * base) / (own.tries + kPriorWeight);
}

void ChainRates::observe(int match_len, int depth, bool accepted, double decay) {
  Count& c = counts_[match_bucket(match_len)][depth_bucket(depth)];
  c.hits = c.hits * decay + (accepted ? 1.0 : 0.0);
  c.tries = c.tries * decay + 1.0;
}

void choose_chain_lengths(std::vector<ChainOffer>& offers, int base_rows, int decode_requests,
                          int max_extra_rows, const StepCost& cost) {
  using Candidate = std::pair<double, int>;  // survival of the offer's next draft, ~index
  std::priority_queue<Candidate> queue;
  auto push = [&](int i, int next) {
    if (next < offers[i].length) queue.emplace(offers[i].survival[next], -i);
  };
  for (int i = 0; i < static_cast<int>(offers.size()); ++i) {
    offers[i].chosen = 0;
    push(i, 0);
  }
  std::vector<int> taken;  // offer index of each draft, in descending order of survival
  double expected = decode_requests;
  double best = expected / cost(std::max(base_rows, 1));
  std::size_t best_count = 0;
  std::vector<int> next(offers.size(), 0);
  while (!queue.empty() && static_cast<int>(taken.size()) < max_extra_rows) {
    const auto [gain, negated] = queue.top();
    queue.pop();
    const int i = -negated;
    taken.push_back(i);
    expected += gain;
    const double value = expected / cost(base_rows + static_cast<int>(taken.size()));
    if (value > best) {
      best = value;
      best_count = taken.size();
    }
    push(i, ++next[i]);
  }
  for (std::size_t k = 0; k < best_count; ++k) ++offers[taken[k]].chosen;
}

}  // namespace specdec
