// How much a request drafts in a step that is planned before the steps in front of it were read.
//
// Lookahead: LookaheadArms, as on the host. Drafts from outside: SizeArms. Prompt lookup: the host
// does not know the match that the device will find, so the chance that a draft is accepted is kept
// by its depth alone. What was not drafted teaches nothing here: every now and then a step drafts
// its full length, in proportion to what that costs (about 2 % of the time), so nothing is ever off
// for good. Results arrive `depth` steps late; they are told what their step was allowed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "algo/slot.h"
#include "engine/chain_budget.h"
#include "engine/draft_arms.h"
#include "engine/step_cost.h"

namespace specdec {

// A request's own past of prompt lookup.
class AheadChain {
 public:
  // Chance of each of the next `length` drafts, where `shared` is what all requests showed. The
  // array is this object's.
  const double* survival(const ChainRates& shared, int length);
  // True when a step that drafts `length` is due although `chosen` would be best; `rows`: of the
  // step without this request's drafts.
  bool probes(const StepCost& cost, int rows, int length, int chosen);
  // A step was allowed `allowed` drafts and `accepted` were right.
  void observe(ChainRates& shared, int allowed, int accepted);

 private:
  ChainRates rates_;
  std::vector<double> survival_;
  std::int64_t step_ = 0, last_full_ = 0;
};

// The share of one step and the arm that it came from, -1: none was chosen.
struct AheadShare {
  DraftShare share;
  int arm = -1;
};

}  // namespace specdec
