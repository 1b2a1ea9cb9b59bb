// A lookahead state with the memory it lives in, for users outside the executor: checks its
// arguments, remembers the tree of the last draft.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "algo/lookahead.h"
#include "base/types.h"
#include "tree/draft_tree.h"

namespace specdec {

class OwnedLookahead {
 public:
  // Throws std::invalid_argument for an invalid triple, an empty prompt or a negative token.
  OwnedLookahead(const LookaheadConfig& cfg, const std::vector<TokenId>& prompt, std::uint64_t seed,
                 std::int32_t pool_grams);

  const DraftTree& draft(TokenId golden, const LookaheadBudget& budget);
  // `sampled` holds one entry per node of the last draft; empty when nothing was drafted.
  void update(const std::vector<TokenId>& sampled, const std::vector<TokenId>& accepted);
  // The grams of a key, least recently inserted first.
  std::vector<std::vector<TokenId>> pool_entries(TokenId key) const;

  LookaheadState* state() const { return reinterpret_cast<LookaheadState*>(block_.get()); }
  const DraftTree& tree() const { return tree_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_;
  std::unique_ptr<std::uint64_t[]> block_;
  DraftTree tree_;
  bool drafted_ = false;
};

}  // namespace specdec
