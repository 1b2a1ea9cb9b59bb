// The verbs of an in-engine drafter, one object per request:
//   begin -> { offer -> build -> update } * -> end -> destroyed with the request.
// A drafter never sees K/V, pages, devices or other requests. Whatever it proposes, the output is
// the target's own; a drafter only decides how many forward passes that takes.
#pragma once

#include <cstddef>
#include <vector>

#include "base/types.h"
#include "engine/step_cost.h"
#include "tree/draft_tree.h"

namespace specdec {

struct DraftLimits {
  int max_depth = 0;   // no node deeper than this: the length limits of the request
  int max_drafts = 0;  // nodes besides the golden token
  bool adaptive = true;
};

// What the draft budget needs to weigh a draft: the cost table (may be unknown) and how many rows
// the step has without this request.
struct BudgetContext {
  const StepCost& cost;
  int other_rows = 0;
};

class Drafter {
 public:
  virtual ~Drafter() = default;

  // The prompt has been read and `history` = prompt + first token.
  virtual void begin(const std::vector<TokenId>& history) = 0;

  // Thinks of drafts after `history`; returns how many nodes are on offer (<= limits.max_drafts).
  virtual int offer(const std::vector<TokenId>& history, const DraftLimits& limits,
                    const BudgetContext& budget) = 0;

  // Estimated probability that node i (0-based, drafts only) is accepted; non-increasing. Null:
  // the offer is all or nothing and has been weighed in offer() already.
  virtual const double* survival() const { return nullptr; }

  // Puts the first `num_drafts` nodes of the offer into the tree.
  virtual void build(const std::vector<TokenId>& history, int num_drafts, DraftTree* tree) = 0;

  // `sampled[i]` is the target's token after node i of `tree` (as built). The last `num_new` tokens
  // of `history` were decided by this step. Called for every decode step, drafted or not.
  virtual void update(const std::vector<TokenId>& history, int num_new, const DraftTree& tree,
                      const TokenId* sampled) = 0;

  // The request has ended by itself (not failed, not cancelled); `history` is its whole text.
  virtual void end(const std::vector<TokenId>& history) { static_cast<void>(history); }

  virtual std::size_t memory_bytes() const = 0;
};

}  // namespace specdec
