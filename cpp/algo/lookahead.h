// Lookahead decoding of one request: three verbs over a LookaheadState.
//
//   init    once, with the prompt: fill the pool with its n-grams, draw the window.
//   draft   before a step: a tree of the lookahead branch (window) and the verification branch
//           (guesses from the pool for the golden token), equal prefixes merged.
//   update  after a step: advance the window with the target's choices, feed its grams and then the
//           accepted tokens to the pool. Acceptance itself is accept.h over all nodes.
//
// update may also be called without a draft (the first token after the prompt, or a step decoded
// plainly): then only tail and pool move on. Output is greedy whatever window and pool hold; they
// decide how fast it comes.
#pragma once

#include <cstdint>

#include "algo/lookahead_pool.h"
#include "algo/lookahead_state.h"
#include "algo/lookahead_window.h"
#include "algo/team.h"
#include "algo/trie_merge.h"
#include "tree/draft_tree.h"

namespace specdec {

// Grams of the window rows, keyed by row_key().
struct WindowGrams {
  const TokenId* keys;
  const TokenId* window;
  std::int32_t columns;
  SPECDEC_HD TokenId key(std::int32_t i) const { return keys[i]; }
  SPECDEC_HD TokenId token(std::int32_t i, std::int32_t j) const { return window[i * columns + j]; }
};

// Grams of a text given in two pieces: gram i is tokens i+1..i+N-1, its key token i.
struct TextGrams {
  const TokenId* head;
  std::int32_t head_len;
  const TokenId* rest;
  SPECDEC_HD TokenId at(std::int32_t i) const {
    return i < head_len ? head[i] : rest[i - head_len];
  }
  SPECDEC_HD TokenId key(std::int32_t i) const { return at(i); }
  SPECDEC_HD TokenId token(std::int32_t i, std::int32_t j) const { return at(i + 1 + j); }
};

// `state` points to lookahead_bytes_required(cfg, pool_grams) bytes; cfg is valid; n >= 1 tokens,
// none negative. The prompt is not kept.
template <Team TeamT>
SPECDEC_HD inline void lookahead_init(const TeamT& team, LookaheadState* state,
                                      const LookaheadConfig& cfg, std::int32_t pool_grams,
                                      const TokenId* prompt, std::int32_t n, std::uint64_t seed) {
  if (team.rank() == 0) {
    state->cfg = cfg;
    state->pool_ways = lookahead_pool_ways(cfg.g);
    state->pool_sets = lookahead_pool_sets(cfg.g, pool_grams);
    state->golden = -1;
  }
  team.sync();
  lookahead_pool_clear(team, state);
  lookahead_window_init(team, state, prompt, n, seed);
  const std::int32_t gram_len = cfg.n - 1;
  for (std::int32_t i = team.rank(); i < gram_len; i += team.size()) {
    const std::int32_t from = n - gram_len + i;
    state->tail()[i] = from >= 0 ? prompt[from] : -1;
  }
  team.sync();
  const std::int32_t windows = cfg.n > 1 && n >= cfg.n ? n - cfg.n + 1 : 0;
  lookahead_pool_insert(team, state, TextGrams{prompt, n, nullptr}, windows);
}

// Writes the tree of this step: node 0 is `golden`, then the lookahead branch row by row, then the
// guesses, oldest first; a node stands where its path came first. Returns tree->size.
template <Team TeamT>
SPECDEC_HD inline std::int32_t lookahead_draft(const TeamT& team, LookaheadState* state,
                                               TokenId golden, const LookaheadBudget& budget,
                                               DraftTree* tree) {
  const auto cut = [](std::int32_t value, std::int32_t limit) {
    return value < 0 ? 0 : (value < limit ? value : limit);
  };
  const std::int32_t gram_len = state->gram_len();
  const std::int32_t max_drafts = cut(budget.max_drafts, kMaxDraftLen);
  const std::int32_t max_depth = cut(budget.max_depth, kMaxDraftLen);
  std::int32_t guess_len = cut(budget.guess_len, gram_len);
  if (guess_len > max_depth) guess_len = max_depth;
  const std::int32_t wanted = guess_len == 0 ? 0 : cut(budget.guesses, state->cfg.g);
  const std::int32_t found = lookahead_pool_lookup(team, state, golden, wanted, state->guesses());
  if (team.rank() == 0) {
    TrieBuilder trie{tree, state->first_child(), state->next_sibling(), state->origin()};
    trie.reset(golden);
    state->golden = golden;
    state->emitted_rows = lookahead_window_emit(state, trie, cut(budget.window_rows, state->cfg.w),
                                                max_drafts, max_depth);
    for (std::int32_t used = 0; used < found && tree->num_drafts() < max_drafts; ++used) {
      const TokenId* gram = state->pool_grams() + std::int64_t{state->guesses()[used]} * gram_len;
      std::int32_t node = 0;
      for (std::int32_t j = 0; j < guess_len && tree->num_drafts() < max_drafts; ++j) {
        node = trie.descend(node, gram[j], kOriginGuess);
      }
    }
  }
  team.sync();
  return tree->size;
}

// `tree_tokens` and `sampled` are those of the last draft's tree ([size]; may be null when nothing
// was drafted since the last update); accepted[0..n_accepted) are the tokens that the step decided.
template <Team TeamT>
SPECDEC_HD inline void lookahead_update(const TeamT& team, LookaheadState* state,
                                        const TokenId* tree_tokens, const TokenId* sampled,
                                        const TokenId* accepted, std::int32_t n_accepted) {
  const std::int32_t gram_len = state->gram_len();
  if (gram_len == 0) return;  // N == 1: plain decoding
  const std::int32_t rows = state->emitted_rows;
  lookahead_window_advance(team, state, tree_tokens, sampled);
  lookahead_pool_insert(team, state, WindowGrams{state->row_key(), state->window(), gram_len},
                        rows);
  if (team.rank() == 0) {
    state->emitted_rows = 0;
  }
  const TextGrams text{state->tail(), gram_len, accepted};
  lookahead_pool_insert(team, state, text, n_accepted);
  // The tail moves down block by block: a block reads only what no earlier block has written.
  for (std::int32_t first = 0; first < gram_len; first += team.size()) {
    const std::int32_t i = first + team.rank();
    const TokenId token = i < gram_len ? text.at(i + n_accepted) : -1;
    team.sync();
    if (i < gram_len) state->tail()[i] = token;
    team.sync();
  }
}

}  // namespace specdec
