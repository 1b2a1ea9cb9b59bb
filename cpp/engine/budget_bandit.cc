#include "engine/budget_bandit.h"

#include <algorithm>

namespace specdec {
namespace {

constexpr double kDecay = 0.08;  // weight of a new observation

}  // namespace

Offer BudgetBandit::offer(double part) {
  gains_.clear();
  rows_.clear();
  for (int i = 1; i < size(); ++i) {
    gains_.push_back(part * (arms_[i].tokens - arms_[0].tokens));
    rows_.push_back(arms_[i].rows);
  }
  return {gains_.data(), size() - 1, rows_.data()};
}

int BudgetBandit::settle(int chosen, const StepBase& step) {
  ++step_;
  // A request shares the step with others: only its own part of the time is its price.
  const double alone = step_seconds(step, 0.0, 0.0);
  for (int i = 1; i < size(); ++i) {
    if (i == chosen) continue;
    const double price = step_seconds(step, arms_[i].rows, arms_[i].rows) / alone;
    if (static_cast<double>(step_ - arms_[i].last_tried) * probe_share_ > price) {
      chosen = i;
      break;
    }
  }
  arms_[chosen].last_tried = step_;
  return chosen;
}

void BudgetBandit::observe(int arm, int draft_rows, int tokens) {
  Arm& a = arms_[arm];
  a.rows += kDecay * (draft_rows - a.rows);
  a.tokens += kDecay * (tokens - a.tokens);
}

LookaheadBandit::LookaheadBandit(const LookaheadConfig& triple) {
  auto add_share = [&](std::int32_t window_rows, std::int32_t guesses, double extra_tokens) {
    for (const LookaheadBudget& other : budgets_) {
      if (other.window_rows == window_rows && other.guesses == guesses) return;
    }
    LookaheadBudget budget;
    budget.window_rows = window_rows;
    budget.guesses = guesses;
    add(1.0 + extra_tokens, lookahead_draft_bound(triple, budget));
    budgets_.push_back(budget);
  };
  add_share(0, 0, 0.0);
  add_share(0, std::min(triple.g, 1), 0.25);
  add_share(0, std::min(triple.g, 3), 0.35);
  add_share(0, triple.g, 0.40);
  add_share((triple.w + 3) / 4, triple.g, 0.45);
  add_share(triple.w, triple.g, 0.55);
}

SizeBandit::SizeBandit(int max_drafts, int max_path) {
  // To begin with: the first draft is right half of the time, each further one brings 0.6 of what
  // the one before it does. Soon outweighed by what is seen.
  double tokens = 1.0, gain = 0.5;
  int next = 0;
  for (const int size : {0, 1, 2, 4, 8, 16, 32, 64, kMaxDraftLen}) {
    const int drafts = std::min(size, max_drafts);
    if (!sizes_.empty() && drafts == sizes_.back()) break;
    for (; next < drafts; ++next) {
      tokens = std::min(tokens + gain, 1.0 + max_path);
      gain *= 0.6;
    }
    sizes_.push_back(drafts);
    add(tokens, drafts);
  }
  share_probes();
}

}  // namespace specdec
