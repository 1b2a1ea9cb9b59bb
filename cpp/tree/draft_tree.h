// The draft tree of one request in one step: tokens and parents, nothing else.
//
// Node 0 is the golden token (last decided token, not yet in the KV cache); nodes 1.. are drafts.
// Invariants: 1 <= size <= kMaxStepTokens; parents[0] == -1; 0 <= parents[i] < i for i >= 1, so the
// nodes are in topological order. Mask, depth, position and paths are derived, never stored beside
// the tree. A linear draft is the tree parents[i] = i - 1.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace specdec {

struct DraftTree {
  std::int32_t size = 0;
  TokenId tokens[kMaxStepTokens];
  std::int32_t parents[kMaxStepTokens];

  SPECDEC_HD void reset(TokenId golden) {
    size = 1;
    tokens[0] = golden;
    parents[0] = -1;
  }
  // Appends a draft under `parent` and returns its index. The caller has checked the capacity.
  SPECDEC_HD std::int32_t add(TokenId token, std::int32_t parent) {
    tokens[size] = token;
    parents[size] = parent;
    return size++;
  }
  SPECDEC_HD std::int32_t num_drafts() const { return size - 1; }
};

// True when every node's parent is its predecessor.
SPECDEC_HD inline bool is_chain(const std::int32_t* parents, std::int32_t size) {
  for (std::int32_t i = 1; i < size; ++i) {
    if (parents[i] != i - 1) return false;
  }
  return true;
}

// depths[i] = number of edges from node i to the golden token (0 for the golden token).
// The absolute position of a node is context length + depth.
SPECDEC_HD inline void derive_depths(const std::int32_t* parents, std::int32_t size,
                                     std::int32_t* depths) {
  for (std::int32_t i = 0; i < size; ++i) depths[i] = i == 0 ? 0 : depths[parents[i]] + 1;
}

// mask[i * kMaskWords ...]: ancestor bits of node i, itself included (format in base/types.h).
SPECDEC_HD inline void derive_mask(const std::int32_t* parents, std::int32_t size,
                                   std::uint32_t* mask) {
  for (std::int32_t i = 0; i < size; ++i) {
    std::uint32_t* row = mask + i * kMaskWords;
    for (int w = 0; w < kMaskWords; ++w) row[w] = i == 0 ? 0u : mask[parents[i] * kMaskWords + w];
    row[i >> 5] |= 1u << (i & 31);
  }
}

// Writes the nodes from the child of the golden token down to `node`; returns how many.
SPECDEC_HD inline std::int32_t derive_path(const std::int32_t* parents, std::int32_t node,
                                           std::int32_t* path) {
  std::int32_t length = 0;
  for (std::int32_t i = node; i > 0; i = parents[i]) ++length;
  std::int32_t at = length;
  for (std::int32_t i = node; i > 0; i = parents[i]) path[--at] = i;
  return length;
}

// Throws std::invalid_argument naming the first offending entry. `vocab_size` <= 0: ids unchecked.
void validate_tree(const TokenId* tokens, const std::int32_t* parents, std::int32_t size,
                   std::int32_t vocab_size);

}  // namespace specdec
