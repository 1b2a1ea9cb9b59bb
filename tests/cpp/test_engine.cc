// Draft budget and score processors, against definitions that try everything.
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "engine/budget_bandit.h"
#include "engine/chain_history.h"
#include "engine/draft_len_schedule.h"
#include "engine/per_salt.h"
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
  ChainRates own, all;
  const auto observe = [&](int times, bool accepted) {
    for (int i = 0; i < times; ++i) {
      own.observe(2, 1, accepted, kOwnDecay);
      all.observe(2, 1, accepted, kSharedDecay);
    }
  };
  observe(300, false);
  CHECK(own.rate(all, DraftSource::kLookup, 2, 1) < 0.05);
  observe(100, true);
  CHECK(own.rate(all, DraftSource::kLookup, 2, 1) > 0.8);
  // A young request leans on what all requests showed.
  const ChainRates young;
  CHECK(young.rate(all, DraftSource::kLookup, 2, 1) > 0.6);
}

TEST(drafts_that_look_likeliest_are_about_as_often_right) {
  // Requests of 60 steps, each with 3 drafts of some of 36 kinds, which are right in 5 to 60 % of
  // all cases. Those are taken that look better than 35 %.
  std::mt19937_64 random(7);
  const auto uniform = [&] { return std::generate_canonical<double, 53>(random); };
  constexpr int kMatches[] = {1, 2, 3, 5, 9, 20}, kDepths[] = {1, 2, 3, 5, 9, 20};
  double truth[6][6];
  for (auto& row : truth) {
    for (double& one : row) one = 0.05 + 0.55 * uniform();
  }
  ChainRates all;
  double expected = 0.0;
  int right = 0, taken = 0;
  for (int request = 0; request < 400; ++request) {
    ChainRates own;
    for (int i = 0; i < 3 * 60; ++i) {
      const auto m = random() % 6, d = random() % 6;
      const double rate = own.rate(all, DraftSource::kLookup, kMatches[m], kDepths[d]);
      const bool accepted = uniform() < truth[m][d];
      if (rate > 0.35) ++taken, expected += rate, right += accepted;
      own.observe(kMatches[m], kDepths[d], accepted, kOwnDecay);
      all.observe(kMatches[m], kDepths[d], accepted, kSharedDecay);
    }
  }
  CHECK(taken > 20000);
  CHECK(right > 0.93 * expected);
  CHECK(right < 1.07 * expected);
}

TEST(drawn_tokens_teach_nothing_of_the_likeliest_ones) {
  PerSaltAndLaw<int> learnt;
  const SamplingLaw greedy{}, drawn{.temperature = 0.7f};
  const auto one = learnt.of("a", greedy);
  *one = 5;
  *learnt.of("a", drawn) = 6;
  *learnt.of("b", greedy) = 7;
  CHECK_EQ(*learnt.of("a", greedy), 5);
  CHECK_EQ(*learnt.of("a", drawn), 6);
  // A request keeps what its salt has learnt, whatever becomes of the salt.
  for (std::size_t i = 0; i < kMaxSaltsThatLearn; ++i) learnt.of(std::to_string(i), drawn);
  CHECK_EQ(*learnt.of("a", greedy), 0);
  CHECK_EQ(*one, 5);
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

TEST(a_step_says_what_fewer_drafts_would_have_brought) {
  SizeBandit all(/*max_drafts=*/8, /*max_path=*/8);  // arms of 0, 1, 2, 4 and 8 drafts
  SizeBandit own(&all);
  const int four = 3, eight = 4;
  CHECK_EQ(own.drafts(four), 4);
  const double start = all.tokens(eight);
  // 2,000 steps with that arm.
  const StepCost flat = make_cost({1, 128}, {1.0, 1.0});
  Budget budget;
  const auto steps = [&](int drafts, const auto& accepted) {
    for (int i = 0; i < 2000; ++i) {
      choose(own, &budget, flat);
      own.observe_step(four, drafts, accepted);
    }
  };
  steps(4, std::vector<int>{0, 2});
  for (const SizeBandit* arms : {&own, &all}) {
    const std::vector<double> tokens{1.0, 2.0, 2.0, 3.0};
    for (int i = 0; i <= four; ++i) {
      CHECK(std::abs(arms->tokens(i) - tokens[i]) < 1e-3);
      CHECK(std::abs(arms->rows(i) - arms->drafts(i)) < 1e-3);
    }
    CHECK_EQ(arms->tokens(eight), start);
  }
  // The drafter itself stopped at one draft, so it would have with more allowed.
  steps(1, std::vector<int>{});
  for (int i = 1; i <= eight; ++i) {
    CHECK(std::abs(own.tokens(i) - 1.0) < 1e-3);
    CHECK(std::abs(own.rows(i) - 1.0) < 1e-3);
  }
  // How many were accepted and not which: that says nothing of fewer.
  steps(4, 2);
  CHECK(std::abs(own.tokens(four) - 3.0) < 1e-3);
  CHECK(std::abs(own.tokens(2) - 1.0) < 1e-3);
  CHECK(std::abs(own.tokens(eight) - 1.0) < 1e-3);
  // One step behind a long rest is one step, not all that is known.
  for (int i = 0; i < 1000; ++i) choose(own, &budget, flat);
  own.observe_step(1, 1, std::vector<int>{0});
  CHECK(all.tokens(1) < 1.2);
}

// Requests of 60 steps, one after the other; a step's first `right` drafts are right. Returns
// how many steps drafted, and adds up the seconds.
int short_requests(SizeBandit* all, int requests, int right, const StepCost& cost, double* spent) {
  Budget budget;
  int drafted = 0;
  for (int r = 0; r < requests; ++r) {
    SizeBandit own(all);
    for (int i = 0; i < 60; ++i) {
      const int arm = choose(own, &budget, cost);
      const int drafts = own.drafts(arm);
      drafted += drafts > 0;
      *spent += cost(1 + drafts);
      std::vector<int> accepted;
      for (int k = 0; k < std::min(right, drafts); ++k) accepted.push_back(k);
      own.observe_step(arm, drafts, accepted);
    }
  }
  return drafted;
}

TEST(short_requests_find_out_that_drafts_pay_again) {
  // A try loses more than a request's share of tries.
  const StepCost cost = make_cost({1, 9}, {1.0, 6.6});
  SizeBandit all(8, 8);
  double spent = 0.0;
  short_requests(&all, 20, 0, cost, &spent);
  spent = 0.0;
  const int tried = short_requests(&all, 100, 0, cost, &spent);  // nothing is ever right
  CHECK(tried > 0);
  CHECK(spent < 1.02 * 6000);
  spent = 0.0;
  short_requests(&all, 30, 3, cost, &spent);
  CHECK(short_requests(&all, 1, 3, cost, &spent) > 50);
}

}  // namespace
}  // namespace specdec
