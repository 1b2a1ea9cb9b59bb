// Acceptance for measuring speed without a trained drafter: how many drafts a step keeps is drawn
// from given rates, whatever the target says. The text is then not the model's.
#pragma once

#include <cstdint>

#include "base/philox.h"
#include "base/types.h"
#include "tree/draft_tree.h"

namespace specdec {

// Drafts that the step at `position` keeps. rates[i]: chance that at least i + 1 are kept, not
// rising with i.
SPECDEC_HD inline std::int32_t synthetic_length(const double* rates, std::int32_t count,
                                                std::uint64_t seed, std::uint64_t position) {
  const double u = philox_uniform(seed, position, RandomPurpose::kSynthetic, 0);
  std::int32_t length = 0;
  while (length < count && u < rates[length]) ++length;
  return length;
}

// The deepest node, the one of smallest index on ties; 0 without drafts. depth: [size].
SPECDEC_HD inline std::int32_t deepest_node(const std::int32_t* depth, std::int32_t size) {
  std::int32_t best = 0;
  for (std::int32_t node = 1; node < size; ++node) {
    if (depth[node] > depth[best]) best = node;
  }
  return best;
}

// `token`, or the next id that is no child of `node`: what follows the last kept draft must not
// look like one more.
SPECDEC_HD inline TokenId not_a_child(const DraftTree& tree, std::int32_t node, TokenId token,
                                      std::int32_t vocab_size) {
  for (std::int32_t tries = 0; tries < tree.size; ++tries) {
    bool taken = false;
    for (std::int32_t i = 1; i < tree.size; ++i) {
      taken |= tree.parents[i] == node && tree.tokens[i] == token;
    }
    if (!taken) break;
    token = token + 1 < vocab_size ? token + 1 : 0;
  }
  return token;
}

}  // namespace specdec
