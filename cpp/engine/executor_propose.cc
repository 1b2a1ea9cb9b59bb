// Drafts from outside: propose(), and their place in the next step's tree.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "engine/executor.h"
#include "engine/executor_request.h"

namespace specdec {

void Executor::propose(RequestId id, const std::vector<TokenId>& tokens,
                       const std::vector<std::int32_t>& parents, const ProposedProbs& probs) {
  SPECDEC_REQUIRE(tokens.size() == parents.size(), "propose: ", tokens.size(), " tokens and ",
                  parents.size(), " parents");
  SPECDEC_REQUIRE(tokens.size() <= static_cast<std::size_t>(kMaxDraftLen),
                  "propose: ", tokens.size(), " drafts, a step has at most ", kMaxDraftLen);
  DraftTree tree;
  tree.reset(0);
  for (std::size_t i = 0; i < tokens.size(); ++i) tree.add(tokens[i], parents[i] + 1);
  validate_tree(tree.tokens, tree.parents, tree.size, config_.vocab_size);
  SPECDEC_REQUIRE(probs.data == nullptr || probs.rows == tree.num_drafts(), "propose: probs has ",
                  probs.rows, " rows for ", tree.num_drafts(), " drafts: give one row per draft");
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& request : running_) {
    if (request->id != id) continue;
    SPECDEC_REQUIRE(tree.size <= step_rows_bound(request->params), "propose: ", tree.num_drafts(),
                    " drafts, this request may have ", step_rows_bound(request->params) - 1);
    request->has_proposal = false;
    request->proposal_probs.clear();
    if (probs.data != nullptr) {
      request->proposal_probs.assign(probs.data, probs.row_stride, probs.columns, probs.vocab_ids,
                                     probs.replacement, tokens.data(), parents.data(),
                                     tree.num_drafts(), config_.vocab_size, vocab_scratch_);
    }
    request->proposal = tree;
    request->has_proposal = true;
    return;
  }
  SPECDEC_REQUIRE(false, "propose: request ", id, " is not running");
}

// Uses the drafts handed in by propose(), less what the limits cut off. The cut looks at places in
// the tree, never at tokens: what is left was drawn from what it says.
int Executor::place_proposal(Request& request, const DraftLimits& limits) {
  request.has_proposal = false;
  // A proposal for the step after may come while this one is in flight.
  std::swap(request.proposal_probs, request.step_probs);
  request.proposal_probs.clear();
  request.tree_has_probs = request.step_probs.given();
  const DraftTree& proposal = request.proposal;
  std::int32_t depth[kMaxStepTokens];
  std::int32_t placed[kMaxStepTokens];  // index in request.tree, -1: cut off
  derive_depths(proposal.parents, proposal.size, depth);
  placed[0] = 0;
  for (int i = 1; i < proposal.size; ++i) {
    const std::int32_t parent = placed[proposal.parents[i]];
    const bool fits = parent >= 0 && depth[i] <= limits.max_depth &&
                      request.tree.num_drafts() < limits.max_drafts;
    placed[i] = fits ? request.tree.add(proposal.tokens[i], parent) : -1;
    if (fits) request.proposal_source[placed[i]] = i - 1;
  }
  return request.tree.num_drafts();
}

}  // namespace specdec
