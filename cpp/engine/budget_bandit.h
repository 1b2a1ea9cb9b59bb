// Which share of a tree of drafts pays, where no probability of each node is known.
//
// The window branch of a lookahead step earns by filling the n-gram pool for later steps, and what
// a device's drafter is sure of the host does not learn. So a handful of shares (arms) are compared
// by what they were seen to earn: tokens per step over predicted step time. An arm that looks bad
// is tried again now and then, in proportion to its price, so nothing is ever off for good.
#pragma once

#include <cstdint>
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
  // What an arm brought that was chosen, lately if not last: draft rows of its step, tokens that
  // the request got.
  void observe(int arm, int draft_rows, int tokens);

  // Tokens that a step of this arm brings, as far as was seen.
  double tokens(int arm) const { return arms_[arm].tokens; }
  int size() const { return static_cast<int>(arms_.size()); }
  int full() const { return size() - 1; }

 protected:
  // Tokens per step and draft rows to start from.
  void add(double tokens, int drafts) {
    arms_.push_back({tokens, static_cast<double>(drafts), drafts, 0});
  }
  // All probes together take kProbeShare.
  void share_probes() { probe_share_ = kProbeShare / size(); }

 private:
  struct Arm {
    double tokens, rows;          // moving averages
    int drafts;                   // at most
    std::int64_t last_tried = 0;  // step number
  };
  std::vector<Arm> arms_;
  std::vector<double> gains_, rows_;  // of the last offer()
  std::int64_t step_ = 0;
  double probe_share_ = kProbeShare;  // of each
};

// Shares of a request's triple: none of it, guesses alone, window rows too.
class LookaheadBandit : public BudgetBandit {
 public:
  explicit LookaheadBandit(const LookaheadConfig& triple);
  LookaheadBudget budget(int arm) const { return budgets_[arm]; }

 private:
  std::vector<LookaheadBudget> budgets_;
};

// Numbers of drafts, for a drafter that puts those first that are worth most.
class SizeBandit : public BudgetBandit {
 public:
  SizeBandit(int max_drafts, int max_path);
  int drafts(int arm) const { return sizes_[arm]; }

 private:
  std::vector<int> sizes_;
};

}  // namespace specdec
