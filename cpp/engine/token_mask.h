// Which tokens a grammar allows behind each node of a request's tree, and what that changes.
//
// Drafts that the grammar does not allow are cut before the pass. Where drafts were drawn from
// probabilities q, a draft that is kept is one drawn from q without the tokens that are not allowed
// there: cut ones say nothing of those that are kept (of several siblings, one after another), so
// rejection sampling with that law gives the target's own.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "algo/draft_probs.h"
#include "base/types.h"
#include "tree/draft_tree.h"

namespace specdec {

// Packed bits, 32 tokens per word, least significant first.
struct TokenMasks {
  const std::uint32_t* bits = nullptr;  // [rows, words]
  int rows = 0;                         // nodes of the tree
  int words = 0;                        // at least as many as the vocabulary needs

  const std::uint32_t* row(int node) const {
    return bits + static_cast<std::ptrdiff_t>(node) * words;
  }
  bool allows(int node, TokenId token) const {
    return ((row(node)[token >> 5] >> (token & 31)) & 1u) != 0;
  }
};

// scores [vocab_size] with the tokens forbidden that have no bit.
void apply_token_mask(const std::uint32_t* bits, int vocab_size, const float* scores, float* out);

// What a greedy request chooses behind these bits: the best token that has one, first of equals.
// None where the best of their scores is not finite, or one is NaN. `masked`: working memory.
std::optional<TokenId> best_allowed(const std::uint32_t* bits, int vocab_size, const float* scores,
                                    std::vector<float>* masked);

// The probabilities of the drafts that a cut has left, one row per node from 1 on.
struct CutDraftProbs {
  DraftProbs probs;
  std::vector<TokenId> own_ids;      // [drafts, columns], where rows have ids of their own
  std::vector<std::int32_t> source;  // [tree.size] draft of `probs` that a node is

  // Row `uncut[i]` of `rows` is what node i was drawn from; ids: [columns], or of each row, or
  // null. Columns of tokens that the mask of the node's parent does not have get 0, the rest sum
  // to 1.
  void fill(const DraftTree& tree, const TokenMasks& masks, const std::int32_t* uncut,
            const float* rows, std::int32_t columns, const TokenId* ids, bool ids_of_each);
};

}  // namespace specdec
