// The n-gram pool of one request: key token -> at most G grams of the N-1 tokens that followed it,
// in order of least recent insertion.
//
// Bounded: a key hashes to one set of `ways` grams; a set holds the grams of all its keys, each
// with a stamp that grows with every insertion. Insertion, for one key:
//   an equal gram is there      it becomes the newest;
//   the key has G grams         its oldest gram is replaced;
//   the set is full             the oldest gram of the set, whatever its key, is replaced;
//   otherwise                   a free entry is taken.
// As long as no set overflows this is TensorRT-LLM's pool. Sets are independent of each other, so
// the ranks of a team share the sets and the result does not depend on their number.
#pragma once

#include <cstdint>

#include "algo/lookahead_state.h"
#include "algo/team.h"

namespace specdec {

SPECDEC_HD inline std::int32_t lookahead_pool_set(TokenId key, std::int32_t sets) {
  std::uint32_t h = static_cast<std::uint32_t>(key) * 0x9E3779B1u;
  h ^= h >> 15;
  return static_cast<std::int32_t>(h & static_cast<std::uint32_t>(sets - 1));
}

template <Team TeamT>
SPECDEC_HD inline void lookahead_pool_clear(const TeamT& team, LookaheadState* state) {
  TokenId* keys = state->pool_keys();
  for (std::int32_t i = team.rank(); i < state->pool_entries(); i += team.size()) keys[i] = -1;
  if (team.rank() == 0) state->pool_stamp = 0;
  team.sync();
}

// Grams are given by a source: source.key(i), and source.token(i, j) for j in [0, N-1).
template <typename Source>
SPECDEC_HD inline void lookahead_pool_insert_one(LookaheadState* state, const Source& source,
                                                 std::int32_t i, TokenId key, std::int32_t set,
                                                 std::uint32_t stamp) {
  const std::int32_t gram_len = state->gram_len(), ways = state->pool_ways;
  TokenId* keys = state->pool_keys() + set * ways;
  std::uint32_t* stamps = state->pool_stamps() + set * ways;
  TokenId* grams = state->pool_grams() + std::int64_t{set} * ways * gram_len;
  for (std::int32_t j = 0; j < gram_len; ++j) {
    if (source.token(i, j) < 0) return;  // reaches before the start of the prompt
  }
  std::int32_t same_key = 0, oldest_of_key = -1, oldest = 0, target = -1;
  for (std::int32_t e = 0; e < ways; ++e) {
    if (keys[e] < 0) {  // entries are taken from the front and never freed
      target = e;
      break;
    }
    if (stamps[e] < stamps[oldest]) oldest = e;
    if (keys[e] != key) continue;
    std::int32_t equal = 0;
    while (equal < gram_len && grams[e * gram_len + equal] == source.token(i, equal)) ++equal;
    if (equal == gram_len) {
      stamps[e] = stamp;
      return;
    }
    ++same_key;
    if (oldest_of_key < 0 || stamps[e] < stamps[oldest_of_key]) oldest_of_key = e;
  }
  if (same_key >= state->cfg.g) {
    target = oldest_of_key;
  } else if (target < 0) {
    target = oldest;
  }
  keys[target] = key;
  stamps[target] = stamp;
  for (std::int32_t j = 0; j < gram_len; ++j) grams[target * gram_len + j] = source.token(i, j);
}

// Inserts `count` grams in order. Grams whose key or a token is negative are skipped.
template <Team TeamT, typename Source>
SPECDEC_HD inline void lookahead_pool_insert(const TeamT& team, LookaheadState* state,
                                             const Source& source, std::int32_t count) {
  if (state->pool_sets == 0) return;  // g == 0: there is nothing to verify
  const std::uint32_t stamp = state->pool_stamp;
  for (std::int32_t i = 0; i < count; ++i) {
    const TokenId key = source.key(i);
    if (key < 0) continue;
    const std::int32_t set = lookahead_pool_set(key, state->pool_sets);
    if (set % team.size() != team.rank()) continue;
    lookahead_pool_insert_one(state, source, i, key, set, stamp + static_cast<std::uint32_t>(i));
  }
  team.sync();
  if (team.rank() == 0) state->pool_stamp = stamp + static_cast<std::uint32_t>(count);
  team.sync();
}

// Writes the entries of the newest `limit` grams of `key`, oldest first; returns how many.
template <Team TeamT>
SPECDEC_HD inline std::int32_t lookahead_pool_lookup(const TeamT& team, LookaheadState* state,
                                                     TokenId key, std::int32_t limit,
                                                     std::int32_t* entries) {
  if (state->pool_sets == 0 || key < 0 || limit <= 0) return 0;
  const std::int32_t ways = state->pool_ways;
  const std::int32_t first = lookahead_pool_set(key, state->pool_sets) * ways;
  const TokenId* keys = state->pool_keys() + first;
  const std::uint32_t* stamps = state->pool_stamps() + first;
  std::int32_t mine = 0, total = 0;
  for (std::int32_t e = team.rank(); e < ways; e += team.size()) mine += keys[e] == key ? 1 : 0;
  team.scan(mine, &total);
  const std::int32_t skipped = total > limit ? total - limit : 0;
  if (mine > 0) {
    for (std::int32_t e = team.rank(); e < ways; e += team.size()) {
      if (keys[e] != key) continue;
      std::int32_t older = 0;
      for (std::int32_t other = 0; other < ways; ++other) {
        older += keys[other] == key && stamps[other] < stamps[e] ? 1 : 0;
      }
      if (older >= skipped) entries[older - skipped] = first + e;
    }
  }
  team.sync();
  return total - skipped;
}

}  // namespace specdec
