// Which share of a tree of drafts pays, where no probability of each node is known.
//
// The window branch of a lookahead step earns by filling the n-gram pool for later steps, and what
// a device's drafter is sure of the host does not learn. So a handful of shares (arms) are compared
// by what they were seen to earn: tokens per step over predicted step time. An arm that looks bad
// is tried again now and then, the rarer the more that is expected to lose, so nothing is ever off
// for good.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "algo/lookahead_state.h"
#include "engine/budget.h"

namespace specdec {

// Arm 0 drafts nothing.
class BudgetBandit {
 public:
  // The arms but the first as options, for the budget; the arrays are this object's. `part`: of
  // what they bring, where something else may bring the same tokens.
  Offer offer(double part = 1.0);
  // The arm for this step: what the budget chose of offer(), or one whose turn it is to be tried.
  // `step`: as it is without this request's drafts, or with those that the budget chose.
  int settle(int chosen, const StepBase& step);
  // What an arm brought, or would have: draft rows of its step, tokens that the request got. What
  // it leans on learns it, too.
  void observe(int arm, int draft_rows, int tokens);

  // Tokens that a step of this arm brings, as far as was seen, and its draft rows.
  double tokens(int arm) const;
  double rows(int arm) const;
  int size() const { return static_cast<int>(arms_.size()); }
  int full() const { return size() - 1; }

 protected:
  // `shared`: what this one leans on while it has seen little, and whose turns to try an arm it
  // takes; null: nothing. It outlives this one.
  explicit BudgetBandit(double decay, BudgetBandit* shared = nullptr)
      : shared_(shared), decay_(decay) {}
  // Tokens per step and draft rows to start from.
  void add(double tokens, int drafts);

 private:
  struct Arm {
    double tokens, rows, weight;                 // sums over what was seen, and how much that is
    std::int64_t last_tried = 0, last_seen = 0;  // step numbers
  };
  double mean(double sum, double weight, double shared) const;

  BudgetBandit* shared_;
  double decay_;  // of what was seen, with each step that it could be seen in
  std::vector<Arm> arms_;
  std::vector<double> gains_, rows_;  // of the last offer()
  double part_ = 1.0;                 // the same
  std::vector<double> losses_;        // scratch of settle()
  std::int64_t step_ = 0;             // of all that lean on this one
  std::int64_t last_try_ = 0;         // of whichever arm, against what looked best
};

// Shares of a request's triple: none of it, guesses alone, window rows too.
class LookaheadBandit : public BudgetBandit {
 public:
  explicit LookaheadBandit(const LookaheadConfig& triple);
  LookaheadBudget budget(int arm) const { return budgets_[arm]; }

 private:
  std::vector<LookaheadBudget> budgets_;
};

// Numbers of drafts, for a drafter that puts those first that are worth most. So a step also shows
// what fewer drafts would have brought.
class SizeBandit : public BudgetBandit {
 public:
  // What all requests have shown; or what one has, which leans on `shared` and teaches it.
  SizeBandit(int max_drafts, int max_path);
  explicit SizeBandit(SizeBandit* shared);

  int drafts(int arm) const { return sizes_[arm]; }
  // A step of this arm verified `drafts` drafts. `accepted`: which of them, in ascending order, as
  // places in the drafter's order from 0.
  void observe_step(int arm, int drafts, std::span<const int> accepted);
  // The same where only their number is known.
  void observe_step(int arm, int drafts, int num_accepted);

 private:
  // Tells `see(arm, draft rows)` of the arm and of the larger ones, if they had done the same.
  template <typename See>
  void tell_larger(int arm, int drafts, See see);

  std::vector<int> sizes_;
};

}  // namespace specdec
