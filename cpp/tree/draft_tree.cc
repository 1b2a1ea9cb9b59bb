#include "tree/draft_tree.h"

#include "base/check.h"

namespace specdec {

void validate_tree(const TokenId* tokens, const std::int32_t* parents, std::int32_t size,
                   std::int32_t vocab_size) {
  SPECDEC_REQUIRE(size >= 1 && size <= kMaxStepTokens, "draft_tree.size = ", size,
                  ": a tree has 1..", kMaxStepTokens, " nodes (golden token plus drafts)");
  SPECDEC_REQUIRE(parents[0] == -1, "draft_tree.parents[0] = ", parents[0],
                  ": node 0 is the golden token, its parent is -1");
  for (std::int32_t i = 1; i < size; ++i) {
    SPECDEC_REQUIRE(parents[i] >= 0 && parents[i] < i, "draft_tree.parents[", i, "] = ", parents[i],
                    ": a parent comes before its child (0..", i - 1, ")");
  }
  if (vocab_size <= 0) return;
  for (std::int32_t i = 0; i < size; ++i) {
    SPECDEC_REQUIRE(tokens[i] >= 0 && tokens[i] < vocab_size, "draft_tree.tokens[", i,
                    "] = ", tokens[i], ": token ids are 0..", vocab_size - 1);
  }
}

}  // namespace specdec
