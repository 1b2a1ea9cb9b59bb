// Which share of a lookahead step pays: none of it, guesses alone, or window rows too.
//
// A lookahead step has no probability per node to weigh: the window branch earns by filling the
// n-gram pool for later steps. So a handful of shares of the request's triple (arms) are compared
// by what they were seen to earn: tokens per step over predicted step time. An arm that looks bad
// is tried again now and then, in proportion to its price (about 2 % of the time each), so nothing
// is ever off for good.
#pragma once

#include <cstdint>
#include <vector>

#include "algo/lookahead_state.h"
#include "engine/step_cost.h"

namespace specdec {

// Of the time, for each choice that does not look best.
inline constexpr double kProbeShare = 0.02;

class LookaheadArms {
 public:
  explicit LookaheadArms(const LookaheadConfig& triple);

  // The arm for this step. `other_rows`: rows the step has beside this request's drafts.
  int choose(const StepCost& cost, int other_rows);
  // What an arm brought that was chosen, lately if not last: draft rows of its step, tokens that
  // the request got.
  void observe(int arm, int draft_rows, int tokens);

  LookaheadBudget budget(int arm) const;
  // Draft rows that a step of this arm has, as far as was seen.
  double rows(int arm) const { return arms_[arm].rows; }
  int size() const { return static_cast<int>(arms_.size()); }
  int full() const { return size() - 1; }

 private:
  struct Arm {
    std::int32_t window_rows, guesses;
    double tokens, rows;          // moving averages, started from an estimate
    std::int64_t last_tried = 0;  // step number
  };
  std::vector<Arm> arms_;
  std::int64_t step_ = 0;
};

}  // namespace specdec
