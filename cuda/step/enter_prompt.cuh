// A prompt's patterns into an empty n-gram index (algo/ngram_index.h), by a whole block: thousands
// of accesses that wait for memory side by side, where a team whose ranks own parts of the tables
// does them nearly one after another.
#pragma once

#include <cstdint>

#include "algo/ngram_index.h"
#include "common/block_team.cuh"
#include "gpu/gpu.cuh"

namespace specdec::cuda {

// A pattern on its way into a table: the n tokens before a position.
struct EnteringPattern {
  NgramEntry* part = nullptr;  // null: none
  std::uint32_t at = 0, tag = 0;
  std::int32_t first = 0;  // what the entry held
};

__device__ __forceinline__ NgramEntry* entry_of(const NgramIndex* index,
                                                const EnteringPattern& pattern) {
  return pattern.part + (pattern.at & static_cast<std::uint32_t>(index->part_entries - 1));
}

// Asks for its first entry. The answer is not needed yet, so others can ask meanwhile.
__device__ __forceinline__ void claim(NgramIndex* index, std::int32_t e, std::int32_t table,
                                      std::uint64_t h, EnteringPattern* pattern) {
  pattern->part = ngram_home(index, table, h);
  pattern->at = static_cast<std::uint32_t>(h);
  pattern->tag = ngram_hash_tag(h);
  pattern->first = atomicCAS(&entry_of(index, *pattern)->first, -1, e);
}

// Writes down the n tokens before position e. False: no room within the probe limit.
__device__ __forceinline__ bool settle(const NgramIndex* index, const TokenId* history,
                                       std::int32_t e, std::int32_t n, EnteringPattern pattern) {
  for (std::int32_t probe = 1;; ++probe) {
    NgramEntry* entry = entry_of(index, pattern);
    // Whatever an entry's first position is replaced by, the same pattern ends there.
    const bool is_new = pattern.first < 0;
    if (is_new || ngram_equal(history, e, pattern.first, n)) {
      if (is_new) entry->tag = pattern.tag;
      if (!is_new) atomicMin(&entry->first, e);
      atomicMax(&entry->last, e);
      return true;
    }
    if (probe == NgramIndex::kMaxProbe) return false;
    ++pattern.at;
    pattern.first = atomicCAS(&entry_of(index, pattern)->first, -1, e);
  }
}

// All patterns that end before position e, some at a time. False: one of them found no room.
__device__ __forceinline__ bool enter_position(NgramIndex* index, const TokenId* history,
                                               std::int32_t e) {
  constexpr int kAtOnce = 4;
  const std::int32_t longest = min(index->max_ngram, e);
  std::uint64_t h = kNgramHashSeed;
  std::int32_t table = 0;
  bool fits = true;
  for (std::int32_t n = 1; n <= longest; n += kAtOnce) {
    EnteringPattern patterns[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (n + i > longest) break;
      h = ngram_hash_step(h, history[e - n - i]);
      if (index->keeps(n + i)) claim(index, e, table++, h, &patterns[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (patterns[i].part != nullptr) fits = settle(index, history, e, n + i, patterns[i]) && fits;
    }
  }
  return fits;
}

// Could a pattern have found no room if they had come in order? It would have to pass over
// kMaxProbe entries that are taken, and so over one group of 64 with nothing free. Which entries
// are taken does not depend on the order.
__device__ __forceinline__ bool crowded(const BlockTeam& team, NgramIndex* index) {
  constexpr std::int32_t kGroup = NgramIndex::kMaxProbe / 2;
  if (index->part_entries <= NgramIndex::kMaxProbe) return false;  // a probe sees all of a part
  const std::int64_t groups =
      std::int64_t{index->tables} * index->parts * index->part_entries / kGroup;
  const NgramEntry* entries = index->table(0);
  bool found = false;
  for (std::int64_t g = team.rank(); g < groups && !found; g += team.size()) {
    found = true;
    for (std::int32_t i = 0; i < kGroup && found; ++i) found = entries[g * kGroup + i].first >= 0;
  }
  return found;
}

// Makes the index of history[0, len), as ngram_init() and ngram_extend() do: the same patterns with
// the same occurrences, if not in the same entries. False, for all threads: it is crowded, and they
// have to do it. All threads of the block call it.
__device__ inline bool enter_prompt(NgramIndex* index, std::int32_t max_len, NgramShape shape,
                                    const TokenId* history, std::int32_t len) {
  const BlockTeam team;
  ngram_init(team, index, max_len, shape);
  bool fits = true;
  for (std::int32_t e = team.rank() + 1; e < len; e += team.size()) {
    fits = enter_position(index, history, e) && fits;
  }
  team.sync();
  const bool good = fits && !crowded(team, index);
  if (__syncthreads_or(good ? 0 : 1) != 0) return false;
  if (team.rank() == 0) index->indexed = max(len - 1, 0);
  team.sync();
  return true;
}

}  // namespace specdec::cuda
