// Builds a draft tree from token paths so that equal prefixes become one node.
//
// A node's index is the order in which its path was first put in, which keeps parents before
// children and makes the tree the same on every machine.
#pragma once

#include <cstdint>

#include "base/types.h"
#include "tree/draft_tree.h"

namespace specdec {

// Child links live in caller memory ([kMaxStepTokens] each) only while the tree is built; -1: none.
struct TrieBuilder {
  DraftTree* tree;
  std::int32_t* first_child;
  std::int32_t* next_sibling;
  std::int32_t* origin;

  SPECDEC_HD void reset(TokenId golden) {
    tree->reset(golden);
    first_child[0] = -1;
    next_sibling[0] = -1;
    origin[0] = 0;
  }

  // The child of `parent` with this token, made if there is none. The caller has left room.
  SPECDEC_HD std::int32_t descend(std::int32_t parent, TokenId token, std::uint8_t from) {
    std::int32_t last = -1;
    for (std::int32_t c = first_child[parent]; c >= 0; c = next_sibling[c]) {
      if (tree->tokens[c] == token) {
        origin[c] |= from;
        return c;
      }
      last = c;
    }
    const std::int32_t node = tree->add(token, parent);
    if (last < 0) {
      first_child[parent] = node;
    } else {
      next_sibling[last] = node;
    }
    first_child[node] = -1;
    next_sibling[node] = -1;
    origin[node] = from;
    return node;
  }
};

}  // namespace specdec
