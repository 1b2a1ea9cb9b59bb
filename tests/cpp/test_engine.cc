// Draft budget and score processors, against definitions that try everything.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "engine/budget_bandit.h"
#include "engine/chain_history.h"
#include "engine/draft_len_schedule.h"
#include "engine/step_cost.h"

namespace specdec {
namespace {

StepCost make_cost(std::vector<int> rows, std::vector<double> seconds) {
  return StepCost(std::move(rows), std::move(seconds));
}

TEST(step_cost_interpolates_and_extrapolates) {
  const StepCost cost = make_cost({1, 4, 8}, {1.0, 4.0, 6.0});
  CHECK_EQ(cost(1), 1.0);
  CHECK_EQ(cost(1), 1.0);  // whatever else the machine does makes a pass slower, never faster
  CHECK_EQ(cost(4), 4.0);
  CHECK_EQ(cost(6), 5.0);
  CHECK_EQ(cost(8), 6.0);
  CHECK_EQ(cost(0), 1.0);
  CHECK(std::abs(cost(12) - (6.0 + 4 * 5.0 / 7)) < 1e-12);
}

TEST(behind_the_table_it_grows_as_over_the_last_four_points) {
  // 1 -> 4 over rows 2..8; the first point does not count, nor the last pair alone.
  const StepCost cost = make_cost({1, 2, 4, 6, 8}, {0.5, 1.0, 1.2, 1.2, 4.0});
  CHECK_EQ(cost(8), 4.0);
  CHECK_EQ(cost(9), 4.5);
  CHECK_EQ(cost(20), 10.0);
  CHECK_EQ(make_cost({1, 4}, {1.0, 2.5})(6), 3.5);
}

TEST(step_cost_is_monotone_whatever_was_measured) {
  const StepCost cost = make_cost({1, 2, 4}, {2.0, 1.0, 3.0});
  CHECK_EQ(cost(1), 1.0);  // whatever else the machine does makes a pass slower, never faster
  for (int rows = 1; rows < 50; ++rows) CHECK(cost(rows + 1) >= cost(rows));
}

TEST(step_cost_grows_with_the_contexts_of_all_requests) {
  StepCost cost, now;
  cost.set({1, 4, 8}, {1.0, 4.0, 6.0}, 100.0, {0.01, 0.02, 0.04});
  cost.at(1, 300.0, &now);  // 200 tokens more
  CHECK(std::abs(now(1) - (1.0 + 200 * 0.01)) < 1e-12);
  CHECK(std::abs(now(4) - (4.0 + 200 * 0.02)) < 1e-12);
  CHECK(std::abs(now(6) - (5.0 + 200 * 0.03)) < 1e-12);
  CHECK(std::abs(now(12) - (6.0 + 4 * 5.0 / 7 + 200 * (0.04 + 4 * 0.03 / 7))) < 1e-12);
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
    std::vector<Offer> offers{{survival.data(), 4}};
    Budget().cut(offers, {now, 1, 1.0, 8});
    return offers[0].chosen;
  };
  CHECK_EQ(chosen(100.0), 4);
  CHECK_EQ(chosen(1000.0), 3);
  CHECK_EQ(chosen(3000.0), 1);
  CHECK_EQ(chosen(1e6), 0);
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
  CHECK(rates.rate(nullptr, 0.4, 2, 1) < 0.1);
  for (int i = 0; i < 60; ++i) rates.observe(2, 1, true, 0.95);
  CHECK(rates.rate(nullptr, 0.4, 2, 1) > 0.8);
  // A young request leans on what all requests showed.
  const ChainRates young;
  CHECK(young.rate(&rates, 0.4, 2, 1) > 0.8);
}

// The arm of a request that is alone in its step.
int choose(BudgetBandit& arms, Budget* budget, const StepCost& cost) {
  const StepBase step{.cost = cost, .tokens = arms.tokens(0)};
  Offer own = arms.offer();
  budget->cut({&own, 1}, step);
  return arms.settle(own.chosen, step);
}

TEST(lookahead_arms_take_what_is_free_and_drop_what_is_dear) {
  const LookaheadConfig triple{7, 7, 7};
  const StepCost flat = make_cost({1, 128}, {1.0, 1.0});
  Budget budget;
  LookaheadBandit eager(triple);
  CHECK_EQ(choose(eager, &budget, flat), eager.full());

  const StepCost dear = make_cost({1, 128}, {1.0, 60.0});
  LookaheadBandit arms(triple);
  int drafted = 0;
  double spent = 0.0;
  const int steps = 20000;
  for (int i = 0; i < steps; ++i) {
    const int arm = choose(arms, &budget, dear);
    const int rows = lookahead_draft_bound(triple, arms.budget(arm));
    drafted += rows > 0;
    spent += dear(rows + 1);
    arms.observe(arm, rows, 1);  // nothing is ever accepted
  }
  CHECK(drafted > 0);               // it keeps asking
  CHECK(spent < 1.15 * steps);      // and it costs little
  for (int i = 0; i < 3000; ++i) {  // the text changes: everything is accepted now
    const int arm = choose(arms, &budget, dear);
    const int rows = lookahead_draft_bound(triple, arms.budget(arm));
    arms.observe(arm, rows, rows > 0 ? 7 : 1);
  }
  CHECK(lookahead_draft_bound(triple, arms.budget(choose(arms, &budget, dear))) > 0);
}

}  // namespace
}  // namespace specdec
