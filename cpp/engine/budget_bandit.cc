#include "engine/budget_bandit.h"

#include <algorithm>
#include <cmath>

#include "engine/chain_history.h"

namespace specdec {
namespace {

// Steps that the start, or what all requests showed, counts for beside what was seen.
constexpr double kLean = 8.0;
// What a try is taken to lose at least, in tokens.
constexpr double kLeastLoss = 0.1;

}  // namespace

void BudgetBandit::add(double tokens, int drafts) {
  if (shared_ != nullptr) {
    arms_.push_back({0.0, 0.0, 0.0});
  } else {
    arms_.push_back({kLean * tokens, kLean * drafts, kLean});
  }
}

double BudgetBandit::mean(double sum, double weight, double shared) const {
  const double lean = shared_ != nullptr ? kLean : 0.0;
  return (sum + lean * shared) / (weight + lean);
}

double BudgetBandit::tokens(int arm) const {
  const double shared = shared_ != nullptr ? shared_->tokens(arm) : 0.0;
  return mean(arms_[arm].tokens, arms_[arm].weight, shared);
}

double BudgetBandit::rows(int arm) const {
  const double shared = shared_ != nullptr ? shared_->rows(arm) : 0.0;
  return mean(arms_[arm].rows, arms_[arm].weight, shared);
}

Offer BudgetBandit::offer(double part) {
  part_ = part;
  gains_.clear();
  rows_.clear();
  for (int i = 1; i < size(); ++i) {
    gains_.push_back(part * (tokens(i) - tokens(0)));
    rows_.push_back(rows(i));
  }
  return {gains_.data(), size() - 1, rows_.data()};
}

int BudgetBandit::settle(int chosen, const StepBase& step) {
  BudgetBandit& turns = shared_ != nullptr ? *shared_ : *this;
  ++turns.step_;
  // Tokens that the step loses by an arm: those that would come in its time, less what it brings.
  const double alone = step_seconds(step, 0.0, 0.0);
  losses_.assign(1, 0.0);
  int likeliest = 0;  // to be better than it looks
  for (int i = 1; i < size(); ++i) {
    const double added = step_seconds(step, rows(i), rows(i)) - alone;
    losses_.push_back(added * step.tokens / alone - part_ * (tokens(i) - tokens(0)));
    if (i != chosen && (likeliest == 0 || losses_[i] < losses_[likeliest])) likeliest = i;
  }
  for (int i = 1; i < size(); ++i) {
    if (i == chosen) continue;
    // Half of all tries are the likeliest arm's, whichever that is at the time.
    const double share = kProbeShare / 2 / (i == likeliest ? 1 : size());
    std::int64_t last = turns.arms_[i].last_tried;
    if (i == likeliest) last = std::max(last, turns.last_try_);
    if (static_cast<double>(turns.step_ - last) * share >
        std::max(losses_[i] - losses_[chosen], kLeastLoss)) {
      chosen = i;
      turns.last_try_ = turns.step_;
      break;
    }
  }
  turns.arms_[chosen].last_tried = turns.step_;
  return chosen;
}

void BudgetBandit::observe(int arm, int draft_rows, int tokens) {
  Arm& a = arms_[arm];
  double kept = decay_;
  if (shared_ == nullptr) {
    // Forgotten with time, down to what a start counts: an arm that was off may come back soon.
    kept = std::pow(decay_, static_cast<double>(step_ - a.last_seen));
    if (a.weight * kept < kLean) kept = std::min(1.0, kLean / a.weight);
    a.last_seen = a.last_tried = step_;
  }
  a.rows = kept * a.rows + draft_rows;
  a.tokens = kept * a.tokens + tokens;
  a.weight = kept * a.weight + 1.0;
  if (shared_ != nullptr) shared_->observe(arm, draft_rows, tokens);
}

LookaheadBandit::LookaheadBandit(const LookaheadConfig& triple) : BudgetBandit(kOwnDecay) {
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

SizeBandit::SizeBandit(int max_drafts, int max_path) : BudgetBandit(kSharedDecay) {
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
}

SizeBandit::SizeBandit(SizeBandit* shared)
    : BudgetBandit(kOwnDecay, shared), sizes_(shared->sizes_) {
  for (const int drafts : sizes_) add(1.0, drafts);
}

template <typename See>
void SizeBandit::tell_larger(int arm, int drafts, See see) {
  see(arm, drafts);
  // The drafter stopped, or the budget cut, before the arm did: a larger one changes nothing.
  for (int i = arm + 1; i < size() && drafts < sizes_[arm]; ++i) see(i, drafts);
}

void SizeBandit::observe_step(int arm, int drafts, std::span<const int> accepted) {
  const auto see = [&](int i, int rows) {
    const auto end = std::upper_bound(accepted.begin(), accepted.end(), rows - 1);
    observe(i, rows, 1 + static_cast<int>(end - accepted.begin()));
  };
  for (int i = 0; i < arm; ++i) see(i, std::min(sizes_[i], drafts));
  tell_larger(arm, drafts, see);
}

void SizeBandit::observe_step(int arm, int drafts, int num_accepted) {
  tell_larger(arm, drafts, [&](int i, int rows) { observe(i, rows, 1 + num_accepted); });
}

}  // namespace specdec
