#include "engine/lookahead_budget.h"

#include <algorithm>

namespace specdec {
namespace {

constexpr double kDecay = 0.08;  // weight of a new observation

}  // namespace

LookaheadArms::LookaheadArms(const LookaheadConfig& triple) {
  auto add = [&](std::int32_t window_rows, std::int32_t guesses, double extra_tokens) {
    for (const Arm& arm : arms_) {
      if (arm.window_rows == window_rows && arm.guesses == guesses) return;
    }
    LookaheadBudget budget;
    budget.window_rows = window_rows;
    budget.guesses = guesses;
    const double rows = lookahead_draft_bound(triple, budget);
    arms_.push_back(Arm{window_rows, guesses, 1.0 + extra_tokens, rows, 0});
  };
  add(0, 0, 0.0);
  add(0, std::min(triple.g, 1), 0.25);
  add(0, std::min(triple.g, 3), 0.35);
  add(0, triple.g, 0.40);
  add((triple.w + 3) / 4, triple.g, 0.45);
  add(triple.w, triple.g, 0.55);
}

int LookaheadArms::choose(const StepCost& cost, int other_rows) {
  ++step_;
  auto time = [&](const Arm& arm) {
    return cost(other_rows + static_cast<int>(arm.rows + 0.5) + 1);
  };
  // A request shares the step with others: only its own part of the time is its price.
  const double alone = cost(other_rows + 1);
  int best = 0;
  double best_value = 0.0;
  for (int i = 0; i < size(); ++i) {
    const double value = (arms_[i].tokens + other_rows) / time(arms_[i]);
    if (value > best_value) {
      best = i;
      best_value = value;
    }
  }
  for (int i = 1; i < size(); ++i) {
    if (i == best) continue;
    const double price = time(arms_[i]) / alone;
    if (static_cast<double>(step_ - arms_[i].last_tried) * kProbeShare > price) {
      best = i;
      break;
    }
  }
  arms_[best].last_tried = step_;
  return best;
}

void LookaheadArms::observe(int arm, int draft_rows, int tokens) {
  Arm& a = arms_[arm];
  a.rows += kDecay * (draft_rows - a.rows);
  a.tokens += kDecay * (tokens - a.tokens);
}

LookaheadBudget LookaheadArms::budget(int arm) const {
  LookaheadBudget budget;
  budget.window_rows = arms_[arm].window_rows;
  budget.guesses = arms_[arm].guesses;
  return budget;
}

}  // namespace specdec
