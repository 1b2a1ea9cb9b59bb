// What requests of one cache_salt have said before: suffix decoding searches it beside a request's
// own text, by the same index and the same look-up (algo/suffix_draft.h).
//
// Two halves, each a text of outputs with a separator in front of every one of them. When the young
// half has its share of requests or tokens it becomes the old one, and what was old goes. So the
// oldest outputs go first, at amortised O(1) per token, from an index that only ever grows.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "algo/suffix_draft.h"
#include "base/types.h"
#include "tree/draft_tree.h"

namespace specdec {

// Salts with a past; the one that was used least recently gives way.
inline constexpr std::size_t kMaxSuffixPasts = 8;

class SuffixPast {
 public:
  static constexpr int kMaxTokens = 1 << 16;  // of both halves, separators included

  struct Draft {
    DraftTree tree;
    std::array<SuffixNode, kMaxStepTokens> nodes;  // [i]: of draft i, the golden token not counted
    int longest = 0;  // tokens of the history that the longest occurrence agrees with; 0: no drafts
  };

  // Takes the output of a request that has ended, of which only the end counts if it is longer than
  // a half. At most `max_requests` outputs are kept; unless tokens run out, at least half as many.
  void add(const TokenId* output, int length, int max_requests);
  // As suffix_draft(), from the half with the longer match, the young one on ties. Valid until the
  // next call.
  const Draft& draft(const TokenId* history, int length, const SuffixLookup& how, int max_drafts,
                     int max_depth);

  std::int64_t bytes() const;
  int num_requests() const { return young_.requests + old_.requests; }

 private:
  struct Half {
    std::vector<TokenId> text;  // [capacity + 1 + kMaxSuffixDepth]: behind `size` a query's end
    std::vector<std::uint64_t> block;
    int size = 0, capacity = 0, requests = 0;

    SuffixState* state() { return reinterpret_cast<SuffixState*>(block.data()); }
    void reserve(int tokens);
    void append(const TokenId* output, int length);
  };
  void draft_from(Half* half, const TokenId* history, int length, const SuffixLookup& how,
                  int max_drafts, int max_depth);

  Half young_, old_;
  Draft draft_;
};

}  // namespace specdec
