// Drafts that an operation in front of the step has put into a slot: those of a model that drafts
// (Medusa, ReDrafter, a draft model), made on the step's stream from the state that the step before
// left. They continue one history; a step that finds another one leaves them out.
#pragma once

#include <cstdint>

#include "algo/team.h"
#include "base/types.h"
#include "tree/draft_tree.h"

namespace specdec {

// Nodes come after their parents.
struct BroughtDraft {
  std::int32_t len;  // of the history that they continue
  std::int32_t count;
  TokenId tokens[kMaxDraftLen];
  std::int32_t parents[kMaxDraftLen];  // earlier drafts; -1: the golden token
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
// -1. `parents` null: a chain. Returns true if the entry where it ended was meant to be one.
template <Team TeamT>
SPECDEC_HD inline bool bring_draft(const TeamT& team, BroughtDraft* to, std::int32_t len,
                                   const TokenId* tokens, const std::int32_t* parents,
                                   std::int32_t count, std::int32_t vocab_size) {
  if (count > kMaxDraftLen) count = kMaxDraftLen;
  const auto parent = [&](std::int32_t i) { return parents == nullptr ? i - 1 : parents[i]; };
  const std::int32_t kept = count_until_bad(team, count, [&](std::int32_t i) {
    return tokens[i] >= 0 && tokens[i] < vocab_size && parent(i) >= -1 && parent(i) < i;
  });
  for (std::int32_t i = team.rank(); i < kept; i += team.size()) {
    to->tokens[i] = tokens[i];
    to->parents[i] = parent(i);
  }
  if (team.rank() == 0) {
    to->len = len;
    to->count = kept;
  }
  team.sync();
  return kept < count && tokens[kept] != -1;
}

// The tree of a step: the first drafts, `max_drafts` at most, in front of the first one that is
// deeper than `max_depth`.
template <Team TeamT>
SPECDEC_HD inline void take_brought_draft(const TeamT& team, const BroughtDraft* from,
                                          std::int32_t len, TokenId golden, std::int32_t max_drafts,
                                          std::int32_t max_depth, DraftTree* tree) {
  std::int32_t count = from->len == len ? from->count : 0;
  if (count > max_drafts) count = max_drafts;
  for (std::int32_t i = team.rank(); i < count; i += team.size()) {
    tree->tokens[i + 1] = from->tokens[i];
    tree->parents[i + 1] = from->parents[i] + 1;
  }
  team.sync();
  if (count > max_depth) {  // near the end of a text only
    count = count_until_bad(team, count, [&](std::int32_t i) {
      std::int32_t depth = 0;
      for (std::int32_t node = i + 1; node > 0 && depth <= max_depth; node = tree->parents[node]) {
        ++depth;
      }
      return depth <= max_depth;
    });
  }
  if (team.rank() == 0) {
    tree->reset(golden);
    tree->size = 1 + count;
  }
  team.sync();
}

}  // namespace specdec
