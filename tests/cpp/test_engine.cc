// Draft budget and score processors, against definitions that try everything.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "engine/chain_budget.h"
#include "engine/draft_arms.h"
#include "engine/draft_len_schedule.h"
#include "engine/step_cost.h"

namespace specdec {
namespace {

StepCost make_cost(std::vector<int> rows, std::vector<double> seconds) {
  StepCost cost;
  cost.set(std::move(rows), std::move(seconds));
  return cost;
}

TEST(step_cost_interpolates_and_extrapolates) {
  const StepCost cost = make_cost({1, 4, 8}, {1.0, 4.0, 6.0});
  CHECK_EQ(cost(1), 1.0);
  CHECK_EQ(cost(2), 2.0);
  CHECK_EQ(cost(4), 4.0);
  CHECK_EQ(cost(6), 5.0);
  CHECK_EQ(cost(8), 6.0);
  CHECK_EQ(cost(12), 8.0);
}

TEST(step_cost_is_monotone_whatever_was_measured) {
  const StepCost cost = make_cost({1, 2, 4}, {2.0, 1.0, 3.0});
  CHECK_EQ(cost(2), 2.0);
  for (int rows = 1; rows < 50; ++rows) CHECK(cost(rows + 1) >= cost(rows));
}

TEST(step_cost_grows_with_the_contexts_of_all_requests) {
  StepCost cost, now;
  cost.set({1, 4, 8}, {1.0, 4.0, 6.0}, 100.0, {0.01, 0.02, 0.04});
  cost.at(1, 300.0, &now);  // 200 tokens more
  CHECK(std::abs(now(1) - (1.0 + 200 * 0.01)) < 1e-12);
  CHECK(std::abs(now(4) - (4.0 + 200 * 0.02)) < 1e-12);
  CHECK(std::abs(now(6) - (5.0 + 200 * 0.03)) < 1e-12);
  CHECK(std::abs(now(12) - (8.0 + 200 * 0.06)) < 1e-12);
  cost.at(2, 300.0, &now);  // each of the two has half of the rows, and a cache of its own
  CHECK(std::abs(now(8) - (6.0 + 2 * 200 * 0.02)) < 1e-12);
  cost.at(4, 300.0, &now);
  CHECK(std::abs(now(4) - (4.0 + 4 * 200 * 0.01)) < 1e-12);
  for (double len : {0.0, 50.0, 100.0}) {  // shorter ones count as the one that was measured
    cost.at(1, len, &now);
    for (int rows = 1; rows < 20; ++rows) CHECK_EQ(now(rows), cost(rows));
  }
  cost.at(0, 300.0, &now);
  CHECK_EQ(now(8), 6.0);
}

TEST(step_cost_growth_is_monotone_and_never_negative) {
  StepCost cost, now;
  cost.set({1, 2, 4}, {1.0, 2.0, 3.0}, 0.0, {-0.5, 0.2, 0.1});
  cost.at(1, 10.0, &now);
  CHECK_EQ(now(1), 1.0);
  CHECK(std::abs(now(2) - 4.0) < 1e-12);
  CHECK(std::abs(now(4) - 5.0) < 1e-12);
  const StepCost plain = make_cost({1, 4}, {1.0, 2.0});
  plain.at(3, 1e6, &now);
  CHECK_EQ(now(4), 2.0);
}

TEST(a_long_context_shortens_chains) {
  const std::vector<double> survival{0.6, 0.4, 0.3, 0.2};
  const auto chosen = [&](double context_len) {
    StepCost cost, now;
    cost.set({1, 5}, {1.0, 1.2}, 128.0, {1e-5, 5e-4});
    cost.at(1, context_len, &now);
    std::vector<ChainOffer> offers{{survival.data(), 4, 0}};
    choose_chain_lengths(offers, 1, 1, 8, now);
    return offers[0].chosen;
  };
  CHECK_EQ(chosen(100.0), 4);
  CHECK_EQ(chosen(1000.0), 3);
  CHECK_EQ(chosen(3000.0), 1);
  CHECK_EQ(chosen(1e6), 0);
}

// Every combination of lengths; the best value of expected tokens per second.
double best_by_trying(const std::vector<std::vector<double>>& survival, std::size_t request,
                      int base_rows, int left, int used, double expected, const StepCost& cost) {
  if (request == survival.size()) return expected / cost(base_rows + used);
  double best = 0.0, gain = 0.0;
  for (int n = 0; n <= std::min<int>(left, static_cast<int>(survival[request].size())); ++n) {
    if (n > 0) gain += survival[request][n - 1];
    best = std::max(best, best_by_trying(survival, request + 1, base_rows, left - n, used + n,
                                         expected + gain, cost));
  }
  return best;
}

TEST(chain_lengths_are_the_best_of_all_combinations) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  for (int round = 0; round < 400; ++round) {
    const int requests = 1 + static_cast<int>(random() % 3);
    std::vector<std::vector<double>> survival(requests);
    for (auto& chain : survival) {
      double alive = 1.0;
      for (int i = static_cast<int>(random() % 5); i > 0; --i)
        chain.push_back(alive *= unit(random));
    }
    const double knee = 1.0 + 2.0 * unit(random);
    const StepCost cost =
        make_cost({1, 2, 5, 20}, {1.0, 1.0 + 0.2 * unit(random), knee, knee + 8.0 * unit(random)});
    const int base = requests + static_cast<int>(random() % 4);
    const int limit = static_cast<int>(random() % 10);
    std::vector<ChainOffer> offers;
    for (const auto& chain : survival) {
      offers.push_back({chain.data(), static_cast<int>(chain.size()), 99});
    }
    choose_chain_lengths(offers, base, requests, limit, cost);
    double expected = requests;
    int used = 0;
    for (int i = 0; i < requests; ++i) {
      CHECK(offers[i].chosen >= 0 && offers[i].chosen <= offers[i].length);
      for (int d = 0; d < offers[i].chosen; ++d) expected += survival[i][d];
      used += offers[i].chosen;
    }
    CHECK(used <= limit);
    const double best = best_by_trying(survival, 0, base, limit, 0, requests, cost);
    CHECK(std::abs(expected / cost(base + used) - best) <= 1e-12 * best);
  }
}

TEST(a_schedule_is_an_upper_bound_by_running_requests) {
  const DraftLenSchedule schedule{{4, 8}, {16, 2}, {20, 0}};
  const auto limit = [&](int running) { return draft_len_limit_for(schedule, running, 8); };
  CHECK_EQ(limit(0), 8);
  CHECK_EQ(limit(1), 8);
  CHECK_EQ(limit(4), 8);
  CHECK_EQ(limit(5), 2);
  CHECK_EQ(limit(16), 2);
  CHECK_EQ(limit(17), 0);
  CHECK_EQ(limit(21), 0);
  CHECK_EQ(draft_len_limit_for({}, 1000, 8), 8);
}

TEST(rates_follow_what_is_observed_and_recover) {
  ChainRates rates;
  for (int i = 0; i < 100; ++i) rates.observe(2, 1, false, 0.95);
  CHECK(rates.rate(nullptr, 2, 1) < 0.1);
  for (int i = 0; i < 60; ++i) rates.observe(2, 1, true, 0.95);
  CHECK(rates.rate(nullptr, 2, 1) > 0.8);
  // A young request leans on what all requests showed.
  const ChainRates young;
  CHECK(young.rate(&rates, 2, 1) > 0.8);
}

TEST(lookahead_arms_take_what_is_free_and_drop_what_is_dear) {
  const LookaheadConfig triple{7, 7, 7};
  const StepCost flat = make_cost({1, 128}, {1.0, 1.0});
  LookaheadArms eager(triple);
  CHECK_EQ(eager.choose(flat, 0), eager.full());

  const StepCost dear = make_cost({1, 128}, {1.0, 60.0});
  LookaheadArms arms(triple);
  int drafted = 0;
  double spent = 0.0;
  const int steps = 20000;
  for (int i = 0; i < steps; ++i) {
    const int arm = arms.choose(dear, 0);
    const int rows = lookahead_draft_bound(triple, arms.budget(arm));
    drafted += rows > 0;
    spent += dear(rows + 1);
    arms.observe(arm, rows, 1);  // nothing is ever accepted
  }
  CHECK(drafted > 0);               // it keeps asking
  CHECK(spent < 1.15 * steps);      // and it costs little
  for (int i = 0; i < 3000; ++i) {  // the text changes: everything is accepted now
    const int arm = arms.choose(dear, 0);
    const int rows = lookahead_draft_bound(triple, arms.budget(arm));
    arms.observe(arm, rows, rows > 0 ? 7 : 1);
  }
  CHECK(lookahead_draft_bound(triple, arms.budget(arms.choose(dear, 0))) > 0);
}

}  // namespace
}  // namespace specdec
