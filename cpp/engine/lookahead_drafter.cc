#include "engine/lookahead_drafter.h"

#include <algorithm>

namespace specdec {

LookaheadDrafter::LookaheadDrafter(const LookaheadConfig& triple, int max_len, std::uint64_t seed)
    : triple_(triple),
      pool_grams_(lookahead_pool_grams(max_len)),
      seed_(seed),
      block_((lookahead_bytes_required(triple, pool_grams_) + 7) / 8),
      arms_(triple) {}

void LookaheadDrafter::begin(const std::vector<TokenId>& history) {
  const auto prompt_len = static_cast<std::int32_t>(history.size()) - 1;
  lookahead_init(SerialTeam{}, state(), triple_, pool_grams_, history.data(), prompt_len, seed_);
  lookahead_update(SerialTeam{}, state(), nullptr, nullptr, history.data() + prompt_len, 1);
}

int LookaheadDrafter::offer(const std::vector<TokenId>& history, const DraftLimits& limits,
                            const BudgetContext& context) {
  LookaheadBudget budget;
  arm_ = -1;
  if (limits.adaptive) {
    arm_ = arms_.choose(context.cost, context.other_rows);
    budget = arms_.budget(arm_);
  }
  budget.max_drafts = limits.max_drafts;
  budget.max_depth = limits.max_depth;
  lookahead_draft(SerialTeam{}, state(), history.back(), budget, &tree_);
  drafted_ = true;
  return tree_.num_drafts();
}

void LookaheadDrafter::build(const std::vector<TokenId>&, int, DraftTree* tree) { *tree = tree_; }

void LookaheadDrafter::update(const std::vector<TokenId>& history, int num_new,
                              const DraftTree& tree, const TokenId* sampled) {
  const TokenId* decided = history.data() + history.size() - static_cast<std::size_t>(num_new);
  // The step may have run another tree than the offered one (drafts handed in from outside).
  const bool ours = drafted_ && tree.size == tree_.size &&
                    std::equal(tree.tokens, tree.tokens + tree.size, tree_.tokens) &&
                    std::equal(tree.parents, tree.parents + tree.size, tree_.parents);
  if (ours) {
    lookahead_update(SerialTeam{}, state(), tree.tokens, sampled, decided, num_new);
    if (arm_ >= 0) arms_.observe(arm_, tree.num_drafts(), num_new);
  } else {
    state()->emitted_rows = 0;
    lookahead_update(SerialTeam{}, state(), nullptr, nullptr, decided, num_new);
  }
  drafted_ = false;
  arm_ = -1;
}

std::size_t LookaheadDrafter::memory_bytes() const {
  return block_.size() * sizeof(block_[0]) + sizeof(*this);
}

}  // namespace specdec
