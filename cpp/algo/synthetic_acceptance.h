// Acceptance for measuring speed without a trained drafter: how many drafts a step keeps is drawn
// from given rates, whatever the target says. The text is then not the model's.
//
// Kept are as many drafts of the tree's deepest path (the one of smallest index on ties) as one
// random number of (seed, position, kSynthetic) says. The token after them is the target's choice,
// or the next id that is no draft there: it must not look like one more.
#pragma once

#include <cstdint>

#include "algo/accept_rules.h"
#include "base/philox.h"
#include "base/types.h"

namespace specdec {

// rates[i]: chance that at least i + 1 drafts are kept, not rising with i.
struct SyntheticRates {
  const double* rates = nullptr;
  std::int32_t count = 0;  // 0: acceptance is real

  SPECDEC_HD bool given() const { return count > 0; }
  // A chance, and not above the one before it; false for a NaN.
  SPECDEC_HD bool valid(std::int32_t i) const {
    return rates[i] >= 0.0 && rates[i] <= (i == 0 ? 1.0 : rates[i - 1]);
  }
};

// Drafts that the step at `position` keeps.
SPECDEC_HD inline std::int32_t synthetic_length(const SyntheticRates& rates, std::uint64_t seed,
                                                std::uint64_t position) {
  const double u = philox_uniform(seed, position, RandomPurpose::kSynthetic, 0);
  std::int32_t length = 0;
  while (length < rates.count && u < rates.rates[length]) ++length;
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

// depth[node] for every node of a tree; in memory that all ranks see.
template <Ranks TeamT>
SPECDEC_HD inline void find_depths(const TeamT& team, const DraftedTree& tree,
                                   std::int32_t* depth) {
  if (team.rank() == 0) depth[0] = 0;
  team.sync();
  // As in accept_greedy(): nodes before a block are final, those inside it are walked.
  for (std::int32_t first = 1; first < tree.size; first += team.size()) {
    const std::int32_t node = first + team.rank();
    if (node < tree.size) {
      std::int32_t at = node, steps = 0;
      for (; at >= first; at = tree.parents[at]) ++steps;
      depth[node] = depth[at] + steps;
    }
    team.sync();
  }
}

// `token`, or the next id that is no child of `node`; `token` if every id is one. Few nodes are
// children, so this is one rank's work.
SPECDEC_HD inline TokenId not_a_child(const DraftedTree& tree, std::int32_t node, TokenId token,
                                      std::int32_t vocab) {
  TokenId free = token;
  for (std::int32_t tries = 0; tries < tree.size; ++tries) {
    bool taken = false;
    for (std::int32_t i = 1; i < tree.size; ++i) {
      taken |= tree.parents[i] == node && tree.tokens[i] == free;
    }
    if (!taken) return free;
    free = free < vocab - 1 ? free + 1 : 0;
  }
  return token;
}

// choose(node, depth), called by all ranks for the root and for nodes of the path: the target's
// token after it; negative: none, an error of the model here too, and the path ends there.
// decided: [size]; filled for the root and the nodes of out->path, other entries are left alone.
template <Ranks TeamT, class Choose>
SPECDEC_HD inline void accept_synthetic(const TeamT& team, const DraftedTree& tree,
                                        const SyntheticRates& rates, std::int32_t vocab,
                                        const Choose& choose, TokenId* decided, AcceptResult* out) {
  std::int32_t* depth = out->hit_depth;
  find_depths(team, tree, depth);
  if (team.rank() == 0) {
    std::int32_t node = deepest_node(depth, tree.size);
    const std::int32_t length =
        synthetic_length(rates, tree.seed, static_cast<std::uint64_t>(tree.position));
    out->path_len = length < depth[node] ? length : depth[node];
    for (; node > 0; node = tree.parents[node]) {
      if (depth[node] <= length) out->path[depth[node] - 1] = node;
    }
  }
  team.sync();
  const std::int32_t wanted = out->path_len;
  std::int32_t node = 0, kept = 0;
  TokenId token;
  for (;; ++kept) {
    token = choose(node, kept);
    team.sync();  // all have read what `choose` reads
    if (kept == wanted || token < 0) break;
    const std::int32_t next = out->path[kept];
    if (team.rank() == 0) decided[node] = tree.tokens[next];
    node = next;
  }
  if (team.rank() == 0) {
    decided[node] = token < 0 ? token : not_a_child(tree, node, token, vocab);
    out->path_len = kept;
  }
  emit_path(team, decided, out);
}

}  // namespace specdec
