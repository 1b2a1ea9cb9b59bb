// Drafts that an operation in front of the step has put into a slot: those of a model that drafts
// (Medusa, ReDrafter, a draft model), made on the step's stream from the state that the step before
// left. They continue one history; a step that finds another one leaves them out.
#pragma once

#include <cstdint>

#include "algo/team.h"
#include "base/types.h"
#include "tree/draft_tree.h"

namespace specdec {

inline constexpr float kUnknownSurvival = -1.0f;

// Nodes come after their parents, those that are worth most first: a step takes a prefix.
struct ProposedDraft {
  std::int32_t len;  // of the history that they continue
  std::int32_t count;
  TokenId tokens[kMaxDraftLen];
  std::int32_t parents[kMaxDraftLen];  // earlier drafts; -1: the golden token
  // The drafter's estimate of the chance that the node and all above it are accepted;
  // kUnknownSurvival: it has none.
  float survival[kMaxDraftLen];
};

// How many of the first `count` entries there are in front of the first that is not good.
template <Team TeamT, typename Good>
SPECDEC_HD inline std::int32_t count_until_bad(const TeamT& team, std::int32_t count, Good good) {
  std::int32_t kept = 0;
  for (std::int32_t first = 0; first < count && kept == first; first += team.size()) {
    const std::int32_t i = first + team.rank();
    const bool is_good = i < count && good(i);
    std::int32_t total = 0;
    const std::int32_t bad_before = team.scan(is_good ? 0 : 1, &total);
    team.scan(is_good && bad_before == 0 ? 1 : 0, &total);
    kept += total;
  }
  return kept;
}

// Writes what a drafter says about the text of `len` tokens, up to the first entry that is no draft
// (a token outside of the vocabulary, a parent that does not come before it): a drafter pads with
// -1. `parents` null: a chain. `survival` null, or an entry that is no probability: unknown.
// Returns true if the entry where it ended was meant to be one.
template <Team TeamT>
SPECDEC_HD inline bool propose_draft(const TeamT& team, ProposedDraft* to, std::int32_t len,
                                     const TokenId* tokens, const std::int32_t* parents,
                                     const float* survival, std::int32_t count,
                                     std::int32_t vocab_size) {
  if (count > kMaxDraftLen) count = kMaxDraftLen;
  const auto parent = [&](std::int32_t i) { return parents == nullptr ? i - 1 : parents[i]; };
  const std::int32_t kept = count_until_bad(team, count, [&](std::int32_t i) {
    return tokens[i] >= 0 && tokens[i] < vocab_size && parent(i) >= -1 && parent(i) < i;
  });
  for (std::int32_t i = team.rank(); i < kept; i += team.size()) {
    to->tokens[i] = tokens[i];
    to->parents[i] = parent(i);
    const float chance = survival == nullptr ? kUnknownSurvival : survival[i];
    to->survival[i] = chance >= 0.0f && chance <= 1.0f ? chance : kUnknownSurvival;
  }
  if (team.rank() == 0) {
    to->len = len;
    to->count = kept;
  }
  team.sync();
  return kept < count && tokens[kept] != -1;
}

// Edges from a proposed draft to the golden token; more than `most`: most + 1.
SPECDEC_HD inline std::int32_t proposed_depth(const ProposedDraft* from, std::int32_t node,
                                              std::int32_t most) {
  std::int32_t depth = 0;
  for (; node >= 0 && depth <= most; node = from->parents[node]) ++depth;
  return depth;
}

// The tree of the drafts that are no deeper than `max_depth`, `max_drafts` at most, by one rank.
// Writes which drafts they are in place of their tokens.
SPECDEC_HD inline std::int32_t take_shallow(const ProposedDraft* from, std::int32_t max_drafts,
                                            std::int32_t max_depth, DraftTree* tree) {
  std::int32_t kept = 0;
  for (std::int32_t i = 0; i < from->count && kept < max_drafts; ++i) {
    if (proposed_depth(from, i, max_depth) > max_depth) continue;
    // Where the parent was put: drafts stand in ascending order.
    std::int32_t low = 0, high = kept;
    while (low < high) {
      const std::int32_t middle = (low + high) / 2;
      if (tree->tokens[middle + 1] < from->parents[i]) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    ++kept;
    tree->parents[kept] = from->parents[i] < 0 ? 0 : low + 1;
    tree->tokens[kept] = i;
  }
  return kept;
}

// The tree of a step: the first `max_drafts` of the drafts that are no deeper than `max_depth`.
template <Team TeamT>
SPECDEC_HD inline void take_proposed_draft(const TeamT& team, const ProposedDraft* from,
                                           std::int32_t len, TokenId golden,
                                           std::int32_t max_drafts, std::int32_t max_depth,
                                           DraftTree* tree) {
  const std::int32_t proposed = from->len == len ? from->count : 0;
  bool too_deep = false;
  for (std::int32_t i = team.rank(); i < proposed && proposed > max_depth; i += team.size()) {
    too_deep = too_deep || proposed_depth(from, i, max_depth) > max_depth;
  }
  std::int32_t count = proposed < max_drafts ? proposed : max_drafts;
  if (team.any(too_deep)) {  // near the end of a text only
    if (team.rank() == 0) tree->size = 1 + take_shallow(from, max_drafts, max_depth, tree);
    team.sync();
    count = tree->size - 1;
    for (std::int32_t i = team.rank(); i < count; i += team.size()) {
      tree->tokens[i + 1] = from->tokens[tree->tokens[i + 1]];
    }
  } else {
    for (std::int32_t i = team.rank(); i < count; i += team.size()) {
      tree->tokens[i + 1] = from->tokens[i];
      tree->parents[i + 1] = from->parents[i] + 1;
    }
  }
  team.sync();
  if (team.rank() == 0) {
    tree->reset(golden);
    tree->size = 1 + count;
  }
  team.sync();
}

}  // namespace specdec
