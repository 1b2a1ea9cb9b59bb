// Proof that the per-request algorithms of cpp/algo compile and link as device code: one kernel per
// verb, one warp per request. Nothing launches them yet.
#include "algo/accept.h"
#include "algo/lookahead.h"
#include "algo/ngram_index.h"
#include "common/warp_team.cuh"

namespace specdec {

__global__ void check_accept(const TokenId* tokens, const std::int32_t* parents, std::int32_t size,
                             const TokenId* sampled, std::int32_t max_path, AcceptResult* out) {
  accept_greedy(WarpTeam{}, tokens, parents, size, sampled, max_path, out);
}

__global__ void check_lookahead_init(LookaheadState* state, LookaheadConfig cfg,
                                     std::int32_t pool_grams, const TokenId* prompt, std::int32_t n,
                                     std::uint64_t seed) {
  lookahead_init(WarpTeam{}, state, cfg, pool_grams, prompt, n, seed);
}

__global__ void check_lookahead_draft(LookaheadState* state, TokenId golden, LookaheadBudget budget,
                                      DraftTree* tree) {
  lookahead_draft(WarpTeam{}, state, golden, budget, tree);
}

__global__ void check_lookahead_update(LookaheadState* state, const TokenId* tree_tokens,
                                       const TokenId* sampled, const TokenId* accepted,
                                       std::int32_t n_accepted) {
  lookahead_update(WarpTeam{}, state, tree_tokens, sampled, accepted, n_accepted);
}

__global__ void check_ngram_init(NgramIndex* index, std::int32_t max_seq_len,
                                 std::int32_t max_ngram) {
  ngram_init(WarpTeam{}, index, max_seq_len, max_ngram);
}

__global__ void check_ngram_lookup(NgramIndex* index, const TokenId* history, std::int32_t len,
                                   NgramLookup how, NgramMatch* out) {
  ngram_extend(WarpTeam{}, index, history, len);
  ngram_lookup(WarpTeam{}, index, history, len, how, out);
}

}  // namespace specdec
