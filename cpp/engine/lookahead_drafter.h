// Lookahead decoding as a Drafter: the state of algo/lookahead.h plus the choice of how much of the
// triple this step is worth (draft_arms.h).
#pragma once

#include <cstdint>
#include <vector>

#include "algo/lookahead.h"
#include "engine/draft_arms.h"
#include "engine/drafter.h"

namespace specdec {

class LookaheadDrafter final : public Drafter {
 public:
  // `max_len`: the request's history never grows beyond this; it bounds the n-gram pool.
  LookaheadDrafter(const LookaheadConfig& triple, int max_len, std::uint64_t seed);

  void begin(const std::vector<TokenId>& history) override;
  int offer(const std::vector<TokenId>& history, const DraftLimits& limits,
            const BudgetContext& budget) override;
  void build(const std::vector<TokenId>& history, int num_drafts, DraftTree* tree) override;
  void update(const std::vector<TokenId>& history, int num_new, const DraftTree& tree,
              const TokenId* sampled) override;
  std::size_t memory_bytes() const override;

 private:
  LookaheadState* state() { return reinterpret_cast<LookaheadState*>(block_.data()); }

  LookaheadConfig triple_;
  std::int32_t pool_grams_;
  std::uint64_t seed_;
  std::vector<std::uint64_t> block_;  // the LookaheadState and its arrays
  LookaheadArms arms_;
  DraftTree tree_;        // of the last offer
  bool drafted_ = false;  // the state holds a draft that has not been updated yet
  int arm_ = -1;          // arm of the last offer, -1: not adaptive
};

}  // namespace specdec
