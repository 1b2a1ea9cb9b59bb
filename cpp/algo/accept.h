// Greedy acceptance along a draft tree: keep the longest path that the target model would have
// decoded itself.
//
// A draft node is kept when its parent is kept (the golden token always is) and its token equals
// the target's choice after the parent. The answer is the deepest kept node, the one of smallest
// index on ties; siblings with equal tokens are therefore allowed. What is emitted is the target's
// choice after the golden token and after every node of that path: path_len + 1 tokens.
//
// The target's choice is -1 for a row of NaN scores. It never equals a token; if the path leads to
// it, it is not emitted and the result says so.
//
// Source: TensorRT-LLM lookahead verification (walks every row of the tree, lookahead rows too).
#pragma once

#include <cstdint>

#include "algo/team.h"
#include "base/types.h"

namespace specdec {

// Room for the answer and the working memory of one acceptance, in memory that all ranks see.
struct AcceptResult {
  std::int32_t path_len;     // accepted draft nodes, 0..max_path
  std::int32_t num_emitted;  // path_len + 1, or path_len when bad_row is set
  std::int32_t bad_row;  // node whose scores were NaN and whose token was to be emitted; else -1
  std::int32_t path[kMaxStepTokens];       // accepted nodes from the golden token's child downwards
  TokenId emitted[kMaxStepTokens];         // the target's choices along the path
  std::int32_t hit_depth[kMaxStepTokens];  // scratch: depth of a kept node, -1 for another one
};

// tokens, parents, sampled: [size]. max_path: nodes deeper than this are not considered (a bound
// such as N-1 of lookahead, or the room left in the request); negative means 0.
template <Ranks TeamT>
SPECDEC_HD inline void accept_greedy(const TeamT& team, const TokenId* tokens,
                                     const std::int32_t* parents, std::int32_t size,
                                     const TokenId* sampled, std::int32_t max_path,
                                     AcceptResult* out) {
  const std::int32_t rank = team.rank(), stride = team.size();
  if (rank == 0) out->hit_depth[0] = 0;
  team.sync();
  // One block of `stride` nodes at a time: parents before the block are final, those inside it are
  // walked. With one rank this is the plain recurrence over nodes.
  for (std::int32_t first = 1; first < size; first += stride) {
    const std::int32_t node = first + rank;
    std::int32_t depth = -1;
    if (node < size) {
      std::int32_t at = node, steps = 0;
      bool kept = true;
      while (kept && at >= first) {
        const TokenId choice = sampled[parents[at]];
        kept = choice >= 0 && tokens[at] == choice;
        at = parents[at];
        ++steps;
      }
      if (kept && out->hit_depth[at] >= 0) depth = out->hit_depth[at] + steps;
    }
    if (node < size) out->hit_depth[node] = depth;  // nobody reads this block's before sync()
    team.sync();
  }
  if (rank == 0) {
    std::int32_t best = 0, best_depth = 0;
    for (std::int32_t node = 1; node < size; ++node) {
      const std::int32_t depth = out->hit_depth[node];
      if (depth > best_depth && depth <= max_path) {
        best = node;
        best_depth = depth;
      }
    }
    out->path_len = best_depth;
    out->emitted[0] = sampled[0];
    for (std::int32_t node = best, i = best_depth; node > 0; node = parents[node], --i) {
      out->path[i - 1] = node;
      out->emitted[i] = sampled[node];
    }
    // Only the last one can be negative: every earlier choice equals a token of the path.
    const bool bad = sampled[best] < 0;
    out->bad_row = bad ? best : -1;
    out->num_emitted = best_depth + (bad ? 0 : 1);
  }
  team.sync();
}

}  // namespace specdec
