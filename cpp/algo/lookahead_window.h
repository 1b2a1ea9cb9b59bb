// The lookahead window: W rows of Jacobi trajectories, read into the draft tree and advanced by one
// token per step with the target's choices.
//
// Rows in the tree (s = position after the golden token, f = filling):
//   warm-up, f < N-1   the prefill tokens P[f..N-3] form a chain from s on; row w begins behind
//                      the chain at position s + N-2-f + w;
//   full, f = N-1      the golden token stands in for the first token of row 0, which therefore
//                      begins with its second column at s; row w >= 1 begins at s-1+w.
// The first token of a row hangs under the first token of the row above (row 0: under the chain;
// full: row 1 under the golden token). A row is emitted whole or not at all, and rows form a
// prefix.
//
// Rows that are not emitted stand still. So rows may be filled to different columns; fill() never
// increases with w because a prefix of rows advances.
#pragma once

#include <cstdint>

#include "algo/lookahead_state.h"
#include "algo/team.h"
#include "algo/trie_merge.h"
#include "base/philox.h"

namespace specdec {

// Fresh window: prefill tokens and first columns are drawn uniformly from the prompt. The draw
// depends on (seed, length of the prompt, index) only.
template <Team TeamT>
SPECDEC_HD inline void lookahead_window_init(const TeamT& team, LookaheadState* state,
                                             const TokenId* prompt, std::int32_t n,
                                             std::uint64_t seed) {
  const std::int32_t columns = state->gram_len();
  const auto bound = static_cast<std::uint32_t>(n);
  for (std::int32_t i = team.rank(); i < state->num_prefill(); i += team.size()) {
    state->prefill()[i] = prompt[philox_below(seed, bound, RandomPurpose::kLookaheadPrefill,
                                              static_cast<std::uint32_t>(i), bound)];
  }
  for (std::int32_t row = team.rank(); row < state->cfg.w; row += team.size()) {
    for (std::int32_t c = 0; c < columns; ++c) state->window()[row * columns + c] = -1;
    if (columns > 0) {
      state->window()[row * columns] = prompt[philox_below(
          seed, bound, RandomPurpose::kLookaheadWindow, static_cast<std::uint32_t>(row), bound)];
    }
    state->fill()[row] = columns > 0 ? 1 : 0;
    state->row_node()[row] = 0;
  }
  if (team.rank() == 0) state->emitted_rows = 0;
  team.sync();
}

// Puts at most `rows` window rows into the tree (one rank only); returns how many. Stops before the
// row that would exceed `max_drafts` nodes, counted before merging, or `max_depth`.
SPECDEC_HD inline std::int32_t lookahead_window_emit(LookaheadState* state, TrieBuilder& trie,
                                                     std::int32_t rows, std::int32_t max_drafts,
                                                     std::int32_t max_depth) {
  const std::int32_t columns = state->gram_len();
  if (columns == 0) return 0;
  const std::int32_t filling = state->fill()[0];
  const bool full = filling == columns;
  const std::int32_t chain = full ? 0 : columns - 1 - filling;
  std::int32_t begin = 0;        // node under which the current row begins
  std::int32_t begin_depth = 0;  // its depth
  std::int32_t emitted = 0;
  for (std::int32_t row = 0; row < rows; ++row) {
    const std::int32_t skipped = full && row == 0 ? 1 : 0;
    const std::int32_t length = state->fill()[row] - skipped;
    const std::int32_t lead = row == 0 ? chain : 0;
    if (trie.tree->num_drafts() + lead + length > max_drafts) break;
    if (begin_depth + lead + length > max_depth) break;
    for (std::int32_t i = 0; i < lead; ++i) {
      begin = trie.descend(begin, state->prefill()[filling + i], kOriginWindow);
      ++begin_depth;
    }
    const TokenId* tokens = state->window() + row * columns + skipped;
    std::int32_t node = begin, first = begin;
    for (std::int32_t i = 0; i < length; ++i) {
      node = trie.descend(node, tokens[i], kOriginWindow);
      if (i == 0) first = node;
    }
    state->row_node()[row] = node;
    if (skipped == 0) {
      begin = first;
      ++begin_depth;
    }
    ++emitted;
  }
  return emitted;
}

// Gives each emitted row the target's choice after its last token. A full row drops its first
// token, which becomes the key of the gram that the row now is; the key of row 0 is the golden
// token of that step, the true predecessor. row_key() is -1 for rows that yield no gram.
template <Team TeamT>
SPECDEC_HD inline void lookahead_window_advance(const TeamT& team, LookaheadState* state,
                                                const TokenId* tree_tokens,
                                                const TokenId* sampled) {
  const std::int32_t columns = state->gram_len();
  for (std::int32_t row = team.rank(); row < state->emitted_rows; row += team.size()) {
    TokenId* tokens = state->window() + row * columns;
    const std::int32_t node = state->row_node()[row];
    const bool usable = sampled[node] >= 0;
    // A row of NaN scores must not put an invalid id into the next step: repeat the last token.
    const TokenId next = usable ? sampled[node] : tree_tokens[node];
    const std::int32_t filled = state->fill()[row];
    if (filled < columns) {
      tokens[filled] = next;
      state->fill()[row] = filled + 1;
      state->row_key()[row] = -1;
    } else {
      state->row_key()[row] = !usable ? -1 : (row == 0 ? state->golden : tokens[0]);
      for (std::int32_t c = 0; c + 1 < columns; ++c) tokens[c] = tokens[c + 1];
      tokens[columns - 1] = next;
    }
  }
  team.sync();
}

}  // namespace specdec
