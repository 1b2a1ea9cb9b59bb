// What served steps teach about T(rows, context), against machines that are known.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "engine/step_times.h"

namespace specdec {
namespace {

const std::vector<int> kRows{1, 2, 4, 8, 16, 32};

StepCost guess() {
  return StepCost(kRows, {1.0, 1.1, 1.3, 1.7, 2.5, 4.1}, 128.0,
                  {1e-4, 1e-4, 1e-4, 2e-4, 4e-4, 8e-4});
}

bool close(double a, double b, double share = 0.02) { return std::abs(a - b) <= share * b; }

TEST(served_steps_replace_the_guess_in_spite_of_noise) {
  std::mt19937 random(3);
  std::exponential_distribution<double> noise(8.0);
  const auto truth = [](int rows) { return 0.3 + 0.02 * rows; };
  StepTimes times(guess());
  for (int i = 0; i < 600; ++i) {
    const int rows = kRows[random() % kRows.size()];
    double seconds = truth(rows) * (1.0 + 0.02 * noise(random));
    if (random() % 10 == 0) seconds *= 20.0;  // the machine did something else
    times.observe(rows, 1, 100.0, seconds);
  }
  CHECK_EQ(times.observed(), 600);
  for (const int rows : kRows) CHECK(close(times.cost()(rows), truth(rows)));
  // The machine becomes slower: what was seen long ago is forgotten.
  for (int i = 0; i < 240; ++i) times.observe(kRows[i % kRows.size()], 1, 100.0, 5.0);
  for (const int rows : kRows) CHECK(close(times.cost()(rows), 5.0));
}

TEST(what_was_not_seen_moves_with_what_was) {
  StepTimes times(guess());
  for (int i = 0; i < 16; ++i) CHECK_EQ(times.observe(1, 1, 10.0, 3.0), (i & (i + 1)) == 0);
  for (const int rows : kRows) CHECK(close(times.cost()(rows), 3.0 * guess()(rows), 1e-6));
  for (int i = 0; i < 16; ++i) times.observe(8, 1, 10.0, 2 * 1.7);
  CHECK(close(times.cost()(8), 3.4, 1e-6));
  CHECK(close(times.cost()(32), 8.2, 1e-6));
  // Between 1 and 8 rows, by places in the table: between 3 and 2 times.
  CHECK(close(times.cost()(4), 1.3 * (3.0 - 2.0 / 3), 1e-6));
}

// Rows that looked dear while the machine was busy are not drafted any more, and so not seen.
TEST(what_looked_dear_and_was_not_seen_for_long_is_forgotten) {
  StepTimes times(guess());
  for (int i = 0; i < 16; ++i) times.observe(1, 1, 10.0, 0.5);
  for (int i = 0; i < 16; ++i) times.observe(8, 1, 10.0, 5 * 1.7);
  for (int i = 0; i < 240; ++i) times.observe(1, 1, 10.0, 0.5);
  CHECK(close(times.cost()(8), 5 * 1.7, 1e-6));  // not yet: it may be true
  for (int i = 0; i < 64; ++i) times.observe(1, 1, 10.0, 0.5);
  for (const int rows : kRows) CHECK(close(times.cost()(rows), 0.5 * guess()(rows), 1e-6));
}

// A table from 8 rows on that an earlier process learnt then: nothing of it was seen in this one.
TEST(what_was_remembered_of_a_busy_machine_is_forgotten) {
  const std::vector<double> busy{1.0, 1.1, 1.3, 5 * 1.7, 5 * 2.5, 5 * 4.1};
  StepTimes times(StepCost(kRows, busy, 128.0), guess());
  for (int i = 0; i < 240; ++i) times.observe(1, 1, 10.0, 2.0);
  CHECK(close(times.cost()(8), 2 * busy[3], 1e-6));
  for (int i = 0; i < 64; ++i) times.observe(1, 1, 10.0, 2.0);
  for (const int rows : kRows) CHECK(close(times.cost()(rows), 2.0 * guess()(rows), 1e-6));
  // What is served is believed, dear or not.
  for (int i = 0; i < 3000; ++i) times.observe(8, 1, 10.0, 9.0);
  CHECK(close(times.cost()(8), 9.0, 1e-6));
}

TEST(what_looked_cheap_is_kept) {
  StepTimes times(guess());
  for (int i = 0; i < 16; ++i) times.observe(8, 1, 10.0, 0.5 * 1.7);
  for (int i = 0; i < 2000; ++i) times.observe(1, 1, 10.0, 1.0);
  CHECK(close(times.cost()(8), 0.5 * 1.7, 1e-6));
}

TEST(a_long_context_teaches_what_context_costs) {
  StepTimes times(guess());
  const auto truth = [](int requests, double context) {
    return 2.0 + requests * (context - 128.0) * 5e-4;
  };
  for (int i = 0; i < 16; ++i) times.observe(4, 4, 128.0, truth(4, 128.0));
  for (int i = 0; i < 32; ++i) times.observe(4, 4, 1000.0, truth(4, 1000.0));
  CHECK(close(times.cost()(4), 2.0));
  StepCost now;
  times.cost().at(4, 4000.0, &now);
  CHECK(close(now(4), truth(4, 4000.0)));
  // Seen at once behind a long text, the guess of its growth is believed and no time is negative.
  StepTimes late(guess());
  for (int i = 0; i < 16; ++i) late.observe(1, 1, 1e6, 0.5);
  for (const double seconds : late.cost().seconds()) CHECK(seconds > 0.0);
}

// One prompt's `rows` rows behind `start` tokens, then `decoding` requests with `context` each.
StepPlan mixed_step(int rows, int start, int decoding, int context) {
  StepPlan plan(1 + decoding, rows + decoding, 1);
  plan.num_requests = 1 + decoding;
  plan.num_rows = rows + decoding;
  plan.num_prefill_rows = rows;
  plan.num_prompts = 1;
  plan.kv_len[0] = start;
  for (int b = 0; b <= decoding; ++b) {
    plan.cu_rows[b + 1] = rows + b;
    if (b > 0) plan.kv_len[b] = context;
  }
  return plan;
}

TEST(steps_that_read_prompts_teach_what_these_add) {
  const auto truth = [](int rows, int start, int decoding, int context) {
    StepCost now;
    guess().at(decoding, context, &now);
    const double text = std::max(0.0, start + rows / 2.0 - 128.0) * guess().growth_at(rows);
    return now(std::max(decoding, 1)) +
           3.0 * (guess()(rows + std::max(decoding, 1)) - guess()(std::max(decoding, 1))) +
           5.0 * text;
  };
  const auto close_to_truth = [&](const StepCost& cost, int rows, int start) {
    StepCost now;
    cost.at(4, 300.0, &now);
    return close(now(4) + cost.prefill(4, rows, start), truth(rows, start, 4, 300));
  };
  StepTimes times(guess());
  // The first one is believed: its text is short, so that its rows say what rows add.
  CHECK(times.observe(mixed_step(24, 100, 4, 300), truth(24, 100, 4, 300)));
  CHECK(close_to_truth(times.cost(), 24, 100) && close_to_truth(times.cost(), 12, 50));
  CHECK(!close_to_truth(times.cost(), 24, 20000));
  CHECK(times.observe(mixed_step(24, 20000, 4, 300), truth(24, 20000, 4, 300)));
  CHECK(close_to_truth(times.cost(), 24, 20000) && close_to_truth(times.cost(), 16, 9000));
  // Nobody decodes: the same, beside one row.
  StepTimes alone(guess());
  CHECK(alone.observe(mixed_step(25, 100, 0, 0), guess()(1) + 3.0 * (guess()(25) - guess()(1))));
  CHECK(close(alone.cost().prefill_scale().rows, 3.0));
  // What decodes is as it was, and a disturbed step among others is not believed.
  for (const int rows : kRows) CHECK(close(times.cost()(rows), guess()(rows), 1e-9));
  for (int i = 0; i < 3; ++i) {
    times.observe(mixed_step(24, 100, 4, 300), truth(24, 100, 4, 300) * (i == 1 ? 50.0 : 1.0));
  }
  CHECK(close_to_truth(times.cost(), 24, 100));
  // Shorter than the others' rows alone would take: as little as can be, never negative.
  StepTimes quick(guess());
  quick.observe(mixed_step(24, 100, 4, 300), 1e-6);
  CHECK(quick.cost().prefill(4, 24, 100) > 0.0);
  CHECK_THROWS(StepCost(kRows, {1, 1, 1, 1, 1, 1}, 0.0, {}, {0.0, 1.0}), std::invalid_argument,
               "step_cost.prefill");
}

// Drafts behind prompts are no prompts' rows, and their requests do not decode.
TEST(prompts_that_bring_drafts) {
  constexpr int kPrompts = 2, kOwn = 6, kDrafts = 8, kDecoding = 4, kContext = 3000;
  StepPlan plan(kPrompts + kDecoding, 32, 1);
  plan.num_requests = kPrompts + kDecoding;
  plan.num_prompts = kPrompts;
  plan.num_prefill_rows = kPrompts * kOwn;
  for (int b = 0; b < plan.num_requests; ++b) {
    plan.cu_rows[b + 1] = plan.cu_rows[b] + (b < kPrompts ? kOwn + kDrafts : 1);
    plan.kv_len[b] = b < kPrompts ? 0 : kContext;
  }
  plan.num_rows = plan.cu_rows[plan.num_requests];
  const int others = plan.num_rows - plan.num_prefill_rows;
  StepCost now;
  guess().at(kDecoding, kContext, &now);
  StepTimes times(guess());
  times.observe(plan, now(others) + 3.0 * (guess()(plan.num_rows) - guess()(others)));
  CHECK(close(times.cost().prefill_scale().rows, 3.0));
}

TEST(what_is_no_measurement_is_ignored) {
  StepTimes times(guess());
  for (const double seconds : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK(!times.observe(1, 1, 10.0, seconds));
  }
  CHECK(!times.observe(0, 1, 10.0, 1.0));
  CHECK(!times.observe(33, 1, 10.0, 1.0));
  CHECK(!times.observe(1, 0, 10.0, 1.0));
  StepPlan plan(2, 8, 1);
  plan.num_requests = 1;
  plan.num_rows = 2;
  plan.cu_rows[1] = 2;
  plan.num_prefill_rows = 2;
  plan.num_prompts = 1;
  for (const double seconds : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK(!times.observe(plan, seconds));
  }
  CHECK_EQ(times.observed(), 0);
  plan.num_prefill_rows = plan.num_prompts = 0;
  CHECK(times.observe(plan, 1.0));
  CHECK_EQ(times.observed(), 1);
  for (int i = 0; i < 20; ++i) times.observe(2, 1, 0.0, std::numeric_limits<double>::infinity());
  for (const double seconds : times.cost().seconds()) CHECK(seconds < 1e4);
  // A table that nobody measured neither.
  StepTimes wild(StepCost({1, 2}, {1e-9, 1e9}, 0.0, {0.0, 1e9}));
  for (int i = 0; i < 64; ++i) wild.observe(1, 1, i < 32 ? 0.0 : 1e6, 1.0);
  CHECK(wild.cost()(2) <= 1e9 && wild.cost()(1) > 0.0);
  CHECK_THROWS(StepTimes(StepCost()), std::invalid_argument, "no points");
}

// A table that was remembered of a busy machine: what is the guess's again lies above the rows that
// are served, and takes nothing off them.
TEST(what_is_forgotten_does_not_pull_down_what_is_served) {
  const std::vector<int> rows{1, 4, 16, 64};
  StepTimes times(StepCost(rows, {10.0, 40.0, 100.0, 400.0}, 0.0, {}),
                  StepCost(rows, {10.0, 14.0, 30.0, 100.0}, 0.0, {}));
  for (int i = 0; i < 400; ++i) {
    const bool drafts = i % 4 == 0;
    times.observe(drafts ? 4 : 1, 1, 0.0, drafts ? 16.0 : 12.0);
    if (i < 16) continue;
    CHECK(close(times.cost()(1), 12.0, 1e-6));
    CHECK(close(times.cost()(4), 16.0, 1e-6));
  }
  CHECK(times.cost()(16) < 40.0);  // and no longer 100's share
}

}  // namespace
}  // namespace specdec
