// Prompt lookup over one request's own history: for every n-gram of 1..M tokens, where it occurred
// first and where it occurred last. Cost per new token and per lookup is O(M), whatever the length
// of the history.
//
// The history is an int32 array owned by the caller (slot); the index stores positions only and
// compares tokens before it believes a hash, so there are no false hits. A pattern that ends before
// position p is indexed once the token at p exists: the suffix of the history never matches itself.
//
// Choice of the occurrence, longest pattern first:
//   keep_all and use_oldest   the earliest occurrence if K tokens follow it, else the most recent
//                             one. TensorRT-LLM's external loop ("V1") yields this: it replaces a
//                             pattern's continuations for as long as the first is shorter than K.
//   otherwise                 the most recent occurrence. (V1 with "newest" keeps a continuation
//                             that occurs again at its old place in a set; here newest is newest.)
// The draft is the text behind the occurrence, at most K tokens, up to the end of the history.
//
// State: one block without pointers, like lookahead_state.h: a head, then one open-addressed table
// per pattern length, each twice as large as the history can be. A table is divided into up to 32
// parts by hash, so that the ranks of a team can fill different parts. A probe ends after kMaxProbe
// entries: a pattern that finds no room is left out, which bounds the work on text made to collide.
// An index with chains (suffix_draft.h) also says, for each occurrence, which one was before it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "algo/team.h"
#include "base/types.h"

namespace specdec {

inline constexpr std::int32_t kMaxNgram = 16;

// Which patterns an index keeps.
struct NgramShape {
  std::uint32_t lengths = 0;  // bit n: those of n tokens, 1 <= n <= kMaxNgram
  bool chained = false;       // with the occurrence before each

  SPECDEC_HD constexpr std::int32_t tables() const {
    std::int32_t count = 0;
    for (std::uint32_t rest = lengths; rest != 0; rest &= rest - 1) ++count;
    return count;
  }
};
SPECDEC_HD constexpr NgramShape ngrams_up_to(std::int32_t max_ngram) {
  return {(std::uint32_t{2} << max_ngram) - 2, false};
}

struct NgramEntry {
  std::uint32_t tag;   // bits of the pattern's hash
  std::int32_t first;  // position after the first occurrence; -1: the entry is free
  std::int32_t last;   // position after the last occurrence
};

// A draft: history[source .. source + length), found by the last match_len tokens. length 0: none.
struct NgramMatch {
  std::int32_t source = 0;
  std::int32_t length = 0;
  std::int32_t match_len = 0;
};

struct NgramLookup {
  std::int32_t max_draft_len = 4;  // K
  bool keep_all = true;
  bool use_oldest = true;
};

struct NgramIndex {
  static constexpr std::int32_t kMaxParts = 32, kMinPartEntries = 256, kMaxProbe = 128;

  std::int32_t max_seq_len, max_ngram;
  std::int32_t part_entries, parts;  // entries of one table = part_entries * parts, powers of two
  std::int32_t indexed;              // patterns ending before positions 1..indexed are in
  std::int32_t tables;
  std::uint32_t lengths;  // NgramShape
  std::int32_t chained;

  SPECDEC_HD bool keeps(std::int32_t n) const { return ((lengths >> n) & 1u) != 0; }
  // The table of the t-th pattern length that is kept, shortest first.
  SPECDEC_HD NgramEntry* table(std::int32_t t) {
    return reinterpret_cast<NgramEntry*>(this + 1) +
           std::int64_t{t} * std::int64_t{part_entries} * parts;
  }
  // [max_seq_len] chained: the occurrence before the one that ends in front of a position, -1:
  // none. Valid for positions that an entry's `last` or another link names.
  SPECDEC_HD std::int32_t* links(std::int32_t t) {
    return reinterpret_cast<std::int32_t*>(table(tables)) + std::int64_t{t} * max_seq_len;
  }
};

SPECDEC_HD constexpr std::int64_t ngram_table_entries(std::int32_t max_seq_len) {
  std::int64_t entries = 16;
  while (entries < std::int64_t{2} * max_seq_len) entries *= 2;
  return entries;
}

// Bytes of the block (aligned to 8) for histories of up to max_seq_len tokens.
SPECDEC_HD constexpr std::size_t ngram_bytes_required(std::int32_t max_seq_len, NgramShape shape) {
  const auto entries = static_cast<std::size_t>(ngram_table_entries(max_seq_len));
  const auto links = static_cast<std::size_t>(shape.chained ? max_seq_len : 0);
  return sizeof(NgramIndex) + static_cast<std::size_t>(shape.tables()) *
                                  (entries * sizeof(NgramEntry) + links * sizeof(std::int32_t));
}

// Hash of the tokens before a position, taken backwards: h(n + 1) = step(h(n), history[e - n - 1]).
inline constexpr std::uint64_t kNgramHashSeed = 0x9E3779B97F4A7C15ull;
SPECDEC_HD constexpr std::uint64_t ngram_hash_step(std::uint64_t h, TokenId token) {
  h = (h ^ static_cast<std::uint32_t>(token)) * 0x9FB21C651E98DF25ull;
  return h ^ (h >> 29);
}
SPECDEC_HD constexpr std::uint32_t ngram_hash_tag(std::uint64_t h) {
  return static_cast<std::uint32_t>(h >> 24);
}

// Makes an empty index; max_seq_len may be smaller than what the block was sized for (a short
// request in a large slot then clears only what it can use).
template <Ranks TeamT>
SPECDEC_HD inline void ngram_init(const TeamT& team, NgramIndex* index, std::int32_t max_seq_len,
                                  NgramShape shape) {
  const std::int64_t entries = ngram_table_entries(max_seq_len);
  std::int32_t parts = 1;
  while (parts < NgramIndex::kMaxParts && entries / (2 * parts) >= NgramIndex::kMinPartEntries) {
    parts *= 2;
  }
  std::int32_t max_ngram = kMaxNgram;
  while (max_ngram > 0 && ((shape.lengths >> max_ngram) & 1u) == 0) --max_ngram;
  if (team.rank() == 0) {
    index->max_seq_len = max_seq_len;
    index->max_ngram = max_ngram;
    index->tables = shape.tables();
    index->lengths = shape.lengths;
    index->chained = shape.chained ? 1 : 0;
    index->parts = parts;
    index->part_entries = static_cast<std::int32_t>(entries / parts);
    index->indexed = 0;
  }
  auto* words = reinterpret_cast<std::int32_t*>(index + 1);
  const std::int64_t count = entries * shape.tables() * 3;
  static_assert(sizeof(NgramEntry) == 12, "the table is cleared word by word");
  for (std::int64_t i = team.rank(); i < count; i += team.size()) words[i] = -1;
  team.sync();
}

SPECDEC_HD inline bool ngram_equal(const TokenId* history, std::int32_t e, std::int32_t other,
                                   std::int32_t n) {
  for (std::int32_t i = 1; i <= n; ++i) {
    if (history[e - i] != history[other - i]) return false;
  }
  return true;
}

SPECDEC_HD inline std::int32_t ngram_part(const NgramIndex* index, std::uint64_t h) {
  return static_cast<std::int32_t>(h >> 59) & (index->parts - 1);
}
SPECDEC_HD inline NgramEntry* ngram_home(NgramIndex* index, std::int32_t t, std::uint64_t h) {
  return index->table(t) + std::int64_t{ngram_part(index, h)} * index->part_entries;
}

// The entry, in table t, of the n tokens before position e of `history`, else the free entry where
// they belong, else null when the probe limit is reached.
SPECDEC_HD inline NgramEntry* ngram_find(NgramIndex* index, const TokenId* history, std::int32_t e,
                                         std::int32_t n, std::int32_t t, std::uint64_t h) {
  NgramEntry* part = ngram_home(index, t, h);
  const std::uint32_t wrap = static_cast<std::uint32_t>(index->part_entries - 1);
  const std::uint32_t tag = ngram_hash_tag(h);
  std::uint32_t at = static_cast<std::uint32_t>(h);
  for (std::int32_t probe = 0; probe < NgramIndex::kMaxProbe; ++probe, ++at) {
    NgramEntry* entry = part + (at & wrap);
    if (entry->first < 0) return entry;
    if (entry->tag == tag && ngram_equal(history, e, entry->first, n)) return entry;
  }
  return nullptr;
}

// Indexes history[0..new_len), of which an earlier call may have indexed a prefix.
// new_len <= max_seq_len.
template <Team TeamT>
SPECDEC_HD inline void ngram_extend(const TeamT& team, NgramIndex* index, const TokenId* history,
                                    std::int32_t new_len) {
  const std::int32_t begin = index->indexed + 1;
  for (std::int32_t e = begin; e < new_len; ++e) {
    std::uint64_t h = kNgramHashSeed;
    const std::int32_t longest = index->max_ngram < e ? index->max_ngram : e;
    std::int32_t t = 0;
    for (std::int32_t n = 1; n <= longest; ++n) {
      h = ngram_hash_step(h, history[e - n]);
      if (!index->keeps(n)) continue;
      const std::int32_t table = t++;
      if (ngram_part(index, h) % team.size() != team.rank()) continue;
      NgramEntry* entry = ngram_find(index, history, e, n, table, h);
      if (entry == nullptr) continue;
      if (entry->first < 0) {
        entry->tag = ngram_hash_tag(h);
        entry->first = e;
      }
      if (index->chained != 0) index->links(table)[e] = entry->last;
      entry->last = e;
    }
  }
  team.sync();
  if (team.rank() == 0 && new_len - 1 > index->indexed) index->indexed = new_len - 1;
  team.sync();
}

// Looks up the suffix of history[0..len), all of which has been given to ngram_extend, in an index
// that keeps patterns of every length up to its longest. `out` lies in memory that all ranks see.
template <Team TeamT>
SPECDEC_HD inline void ngram_lookup(const TeamT& team, NgramIndex* index, const TokenId* history,
                                    std::int32_t len, const NgramLookup& how, NgramMatch* out) {
  if (team.rank() == 0) *out = NgramMatch{};
  team.sync();
  if (how.max_draft_len <= 0) return;
  const std::int32_t longest = index->max_ngram < len - 1 ? index->max_ngram : len - 1;
  std::uint64_t hashes[kMaxNgram + 1];
  hashes[0] = kNgramHashSeed;
  for (std::int32_t n = 1; n <= longest; ++n) {
    hashes[n] = ngram_hash_step(hashes[n - 1], history[len - n]);
  }
  for (std::int32_t top = longest; top > 0; top -= team.size()) {
    const std::int32_t n = top - team.rank();
    NgramEntry* entry = n > 0 ? ngram_find(index, history, len, n, n - 1, hashes[n]) : nullptr;
    const bool hit = entry != nullptr && entry->first >= 0;
    std::int32_t total = 0;
    const std::int32_t longer_hits = team.scan(hit ? 1 : 0, &total);
    if (hit && longer_hits == 0) {
      const bool oldest = how.keep_all && how.use_oldest && len - entry->first >= how.max_draft_len;
      out->source = oldest ? entry->first : entry->last;
      const std::int32_t rest = len - out->source;
      out->length = rest < how.max_draft_len ? rest : how.max_draft_len;
      out->match_len = n;
    }
    if (total > 0) break;
  }
  team.sync();
}

// Host only. Asks for the memory that extend(new_len) and then lookup(new_len) will touch, so that
// the latencies of a batch of requests overlap: first the table entries, then, in a second pass
// over the batch, the text that the entries point to. A hint: it reads and never writes.
enum class NgramPrefetch : std::uint8_t { kEntries, kText };
template <NgramPrefetch kWhat>
inline void ngram_prefetch(NgramIndex* index, const TokenId* history, std::int32_t new_len) {
  std::int32_t begin = index->indexed + 1;
  if (begin < new_len - 8) begin = new_len - 8;  // a whole prompt: the first touches pay
  for (std::int32_t e = begin; e <= new_len; ++e) {
    std::uint64_t h = kNgramHashSeed;
    const std::int32_t longest = index->max_ngram < e ? index->max_ngram : e;
    std::int32_t t = 0;
    for (std::int32_t n = 1; n <= longest; ++n) {
      h = ngram_hash_step(h, history[e - n]);
      if (!index->keeps(n)) continue;
      const std::uint32_t at =
          static_cast<std::uint32_t>(h) & static_cast<std::uint32_t>(index->part_entries - 1);
      const NgramEntry* entry = ngram_home(index, t++, h) + at;
      if constexpr (kWhat == NgramPrefetch::kEntries) {
        __builtin_prefetch(entry, 1);
      } else if (entry->first >= 0) {
        __builtin_prefetch(history + entry->first);
      }
    }
  }
}

}  // namespace specdec
