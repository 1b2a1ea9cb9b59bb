// Suffix decoding of one request: a tree of what followed where the text's last tokens occurred
// before, with the chance of each node.
//
// State: an n-gram index with chains (ngram_index.h) of three pattern lengths. A look-up follows
// the chains of the text's suffix from the most recent occurrence back, those of the longest
// pattern first, until kSuffixOccurrences different ones are found, and compares each with the text
// as far back as max_tree_depth tokens. What follows them is a tree: children of a node are the
// different next tokens of the occurrences that agree with the path so far. With `longest` the
// longest match among these, in tokens of text and path,
//
//   p(child) = p(node) * agreement(longest) * weight(child) / weight(node)
//
// where an occurrence weighs 2 to the tokens that matched, and agreement() is how often the next
// token of a text is among those that followed a match of that length. Nodes are put out best
// first, so the first n of them are the best tree of n nodes, whatever n.
//
// Every number is an integer: the tree does not depend on the machine or on the team's size.
//
// Source: Oliaro et al., "SuffixDecoding: Extreme speculative decoding for emerging AI
// applications" (2024), whose scores are products of count ratios; docs/methods/suffix.md says what
// is different.
#pragma once

#include <cstddef>
#include <cstdint>

#include "algo/ngram_index.h"
#include "algo/team.h"
#include "base/types.h"
#include "tree/draft_tree.h"

namespace specdec {

// Tokens of the patterns that are kept: 1, 3 and 8.
inline constexpr std::uint32_t kSuffixPatterns = (1u << 1) | (1u << 3) | (1u << 8);
inline constexpr std::int32_t kSuffixLengths = 3;
// Occurrences that a draft is made of, and steps along each chain.
inline constexpr std::int32_t kSuffixOccurrences = 8;
inline constexpr std::int32_t kMaxSuffixDepth = 64;
// Probabilities are fractions of this.
inline constexpr std::uint32_t kSuffixOne = 1u << 16;

SPECDEC_HD constexpr NgramShape suffix_shape() { return {kSuffixPatterns, true}; }
static_assert(suffix_shape().tables() == kSuffixLengths);

struct SuffixLookup {
  std::int32_t max_draft_len = 24;
  std::int32_t max_tree_depth = 24;  // tokens that a match is compared over, depth of any draft
  std::uint32_t min_prob = 0;        // of kSuffixOne; nodes below it are left out
  std::uint32_t spec_factor = 0;     // of kSuffixOne: drafts per matched token, 0: no limit
};

// What is known of a node besides its place in the tree.
struct SuffixNode {
  std::uint32_t prob;   // of kSuffixOne: that it and all above it are accepted
  std::uint32_t share;  // of kSuffixOne: of what followed its parent's occurrences, by weight
  std::int32_t match;   // tokens of text and path that its parent's longest occurrence agrees with
};

struct SuffixState {
  std::int32_t count;  // of the last draft, node 0 of the tree not counted
  SuffixNode nodes[kMaxDraftLen];
  // Scratch of a look-up.
  std::int32_t chain_len[kSuffixLengths];
  std::int32_t chain[kSuffixLengths][kSuffixOccurrences];
  std::int32_t num_found;
  std::int32_t found[kSuffixOccurrences];  // position behind each
  std::int32_t match[kSuffixOccurrences];  // tokens in front of it that agree with the text's end
  NgramIndex index;                        // its tables follow the state
};

SPECDEC_HD constexpr std::size_t suffix_bytes_required(std::int32_t max_seq_len) {
  return sizeof(SuffixState) - sizeof(NgramIndex) +
         ngram_bytes_required(max_seq_len, suffix_shape());
}

template <Team TeamT>
SPECDEC_HD inline void suffix_init(const TeamT& team, SuffixState* state,
                                   std::int32_t max_seq_len) {
  if (team.rank() == 0) state->count = state->num_found = 0;
  ngram_init(team, &state->index, max_seq_len, suffix_shape());
}

// Takes what is new of history[0..len).
template <Team TeamT>
SPECDEC_HD inline void suffix_extend(const TeamT& team, SuffixState* state, const TokenId* history,
                                     std::int32_t len) {
  ngram_extend(team, &state->index, history, len);
}

// How often the next token is among those that followed a match of this many tokens, of kSuffixOne:
// measured on the five sets of benchmarks/datasets.py with the default model.
SPECDEC_HD constexpr std::uint32_t suffix_agreement(std::int32_t match) {
  constexpr std::uint32_t kMeasured[] = {24904, 36045, 42598, 47186, 52429,
                                         55050, 57672, 58982, 62259};
  constexpr std::int32_t kCount = sizeof(kMeasured) / sizeof(kMeasured[0]);
  return kMeasured[match < 1 ? 0 : (match > kCount ? kCount : match) - 1];
}

SPECDEC_HD constexpr std::uint32_t suffix_weight(std::int32_t match) {
  constexpr std::int32_t kMost = 12;  // longer matches weigh the same
  return 1u << (match < kMost ? match : kMost);
}

// Fills found, match and num_found for the end of the text.
template <Team TeamT>
SPECDEC_HD inline void suffix_find(const TeamT& team, SuffixState* state, const TokenId* history,
                                   std::int32_t len, std::int32_t max_tree_depth) {
  NgramIndex* index = &state->index;
  for (std::int32_t t = team.rank(); t < kSuffixLengths; t += team.size()) {
    // The t-th pattern length and its hash.
    std::uint64_t h = kNgramHashSeed;
    std::int32_t n = 0, tables = 0;
    while (tables <= t && n < len - 1) {
      ++n;
      h = ngram_hash_step(h, history[len - n]);
      tables += index->keeps(n) ? 1 : 0;
    }
    std::int32_t count = 0;
    const NgramEntry* entry = tables > t ? ngram_find(index, history, len, n, t, h) : nullptr;
    if (entry != nullptr && entry->first >= 0) {
      for (std::int32_t at = entry->last; at >= 0 && count < kSuffixOccurrences;
           at = index->links(t)[at]) {
        state->chain[t][count++] = at;
      }
    }
    state->chain_len[t] = count;
  }
  team.sync();
  if (team.rank() == 0) {
    std::int32_t found = 0;
    for (std::int32_t t = kSuffixLengths - 1; t >= 0; --t) {
      for (std::int32_t i = 0; i < state->chain_len[t] && found < kSuffixOccurrences; ++i) {
        bool known = false;
        for (std::int32_t k = 0; k < found; ++k) known |= state->found[k] == state->chain[t][i];
        if (!known) state->found[found++] = state->chain[t][i];
      }
    }
    state->num_found = found;
  }
  team.sync();
  for (std::int32_t i = team.rank(); i < state->num_found; i += team.size()) {
    const std::int32_t at = state->found[i];
    const std::int32_t most = at < max_tree_depth ? at : max_tree_depth;
    std::int32_t match = 1;
    while (match < most && history[at - match - 1] == history[len - match - 1]) ++match;
    state->match[i] = match;
  }
  team.sync();
}

// Tokens that the longest of the occurrences agrees with; 0: nothing was found.
SPECDEC_HD inline std::int32_t suffix_longest(const SuffixState* state) {
  std::int32_t longest = 0;
  for (std::int32_t i = 0; i < state->num_found; ++i) {
    if (state->match[i] > longest) longest = state->match[i];
  }
  return longest;
}

// Grows the tree, by one rank. The occurrences are divided among the nodes that may come next, so
// there are never more of those than occurrences.
struct SuffixFrontier {
  struct Next {
    std::uint32_t occurrences;  // bit i: found[i]
    std::int32_t parent, depth;
    TokenId token;
    SuffixNode node;
  };
  const SuffixState* state;
  const TokenId* history;
  std::int32_t len;
  std::uint32_t min_prob;
  std::int32_t count = 0;
  Next next[kSuffixOccurrences] = {};

  // The children of a node of depth `depth`, as many as are likely enough.
  SPECDEC_HD void expand(std::uint32_t occurrences, std::int32_t node, std::int32_t depth,
                         std::uint32_t prob) {
    std::uint64_t total = 0;
    std::int32_t longest = 0;
    std::uint64_t weights[kSuffixOccurrences];
    const std::int32_t first = count;
    for (std::int32_t i = 0; i < state->num_found; ++i) {
      if (((occurrences >> i) & 1u) == 0) continue;
      const std::uint32_t weight = suffix_weight(state->match[i]);
      total += weight;
      if (state->match[i] > longest) longest = state->match[i];
      const std::int32_t at = state->found[i] + depth;
      if (at >= len) continue;
      std::int32_t k = first;
      while (k < count && next[k].token != history[at]) ++k;
      if (k == count) {
        next[count++] = {0, node, depth + 1, history[at], {}};
        weights[k] = 0;
      }
      next[k].occurrences |= 1u << i;
      weights[k] += weight;
    }
    const std::int32_t match = longest + depth;
    const std::uint64_t reached = std::uint64_t{prob} * suffix_agreement(match) / kSuffixOne;
    std::int32_t kept = first;
    for (std::int32_t k = first; k < count; ++k) {
      const auto p = static_cast<std::uint32_t>(reached * weights[k] / total);
      if (p < min_prob || p == 0) continue;
      next[kept] = next[k];
      next[kept++].node = {p, static_cast<std::uint32_t>(kSuffixOne * weights[k] / total), match};
    }
    count = kept;
  }

  // Takes the likeliest out; of equal ones the shallowest, then that of the first occurrence.
  SPECDEC_HD Next take_best() {
    std::int32_t best = 0;
    for (std::int32_t k = 1; k < count; ++k) {
      const Next &a = next[k], &b = next[best];
      const bool before = lowest(a.occurrences) < lowest(b.occurrences);
      if (a.node.prob != b.node.prob ? a.node.prob > b.node.prob
                                     : (a.depth != b.depth ? a.depth < b.depth : before)) {
        best = k;
      }
    }
    const Next taken = next[best];
    next[best] = next[--count];
    return taken;
  }

  SPECDEC_HD static std::uint32_t lowest(std::uint32_t bits) { return bits & (~bits + 1); }
};

// The tree of drafts for history[0..len), all of which has been given to suffix_extend: nodes by
// falling probability, at most `max_drafts` of them, none deeper than `max_depth`. `tree` and
// state->nodes are seen by all ranks afterwards.
template <Team TeamT>
SPECDEC_HD inline void suffix_draft(const TeamT& team, SuffixState* state, const TokenId* history,
                                    std::int32_t len, const SuffixLookup& how,
                                    std::int32_t max_drafts, std::int32_t max_depth,
                                    DraftTree* tree) {
  suffix_find(team, state, history, len, how.max_tree_depth);
  if (team.rank() == 0) {
    tree->reset(history[len - 1]);
    std::int32_t most = max_drafts < how.max_draft_len ? max_drafts : how.max_draft_len;
    if (how.max_tree_depth < max_depth) max_depth = how.max_tree_depth;
    SuffixFrontier frontier{state, history, len, how.min_prob};
    if (how.spec_factor > 0) {
      const std::uint64_t limit =
          std::uint64_t{how.spec_factor} * suffix_longest(state) / kSuffixOne;
      if (limit < static_cast<std::uint64_t>(most)) most = static_cast<std::int32_t>(limit);
    }
    if (most > 0 && max_depth > 0 && state->num_found > 0) {
      frontier.expand((1u << state->num_found) - 1, 0, 0, kSuffixOne);
    }
    while (frontier.count > 0 && tree->num_drafts() < most) {
      const SuffixFrontier::Next best = frontier.take_best();
      state->nodes[tree->num_drafts()] = best.node;
      const std::int32_t node = tree->add(best.token, best.parent);
      if (best.depth < max_depth) {
        frontier.expand(best.occurrences, node, best.depth, best.node.prob);
      }
    }
    state->count = tree->num_drafts();
  }
  team.sync();
}

}  // namespace specdec
