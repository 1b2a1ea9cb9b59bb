// Acceptance of drafts by probabilities: the rules beside exact match (algo/accept.h).
//
// All start from the request's own law after each node: its scores along that node's path, with
// processors, temperature and cuts. p is that law, q what a draft was drawn from.
//
//   rejection  lossless. Recursive rejection over siblings (algo/residual.h); the token after the
//              path is drawn from what the rejected drafts left, or from p.
//   typical    LOSSY (Cai et al. 2024, Medusa). A draft is kept if its p is at least
//              min(posterior_threshold, posterior_alpha * exp(-entropy of p)).
//   threshold  LOSSY. A draft is kept if p / q is at least the threshold; q = 1 without probs.
//
// The lossy rules keep the deepest path of such drafts, the one of the largest product of p on
// ties, then of the smallest index; the token after it is drawn from p.
//
// Drafts that were chosen without chance (no probs) need no rule of their own to be lossless: the
// token drawn from p decides. It equals draft d with probability p(d), and given that it does not
// it has the law of p with d left out: that is the rejection rule for such drafts, in one draw that
// depends on nothing but seed and position (algo/sample.h).
//
// Numbers: Philox of (seed, absolute position of the draft, kAccept, index among its siblings), and
// of (seed, position, kToken) for the draw.
#pragma once

#include <algorithm>
#include <cstdint>

#include "algo/accept.h"
#include "algo/draft_probs.h"
#include "algo/sample.h"
#include "base/types.h"
#include "tree/draft_tree.h"

namespace specdec {

enum class AcceptanceRule : std::uint8_t { kExactMatch, kRejection, kTypical, kThreshold };

struct AcceptanceParams {
  AcceptanceRule rule = AcceptanceRule::kExactMatch;
  float posterior_threshold = 0.09f;  // typical
  float posterior_alpha = 0.3f;       // typical
  float threshold = 1.0f;             // threshold

  bool lossless() const {
    return rule == AcceptanceRule::kExactMatch || rule == AcceptanceRule::kRejection;
  }
};

// One request's drafts in front of acceptance.
struct AcceptanceInput {
  const DraftTree* tree;
  const DraftProbs* probs;     // null or not given: drafts were chosen without chance
  const std::int32_t* source;  // [tree->size] draft of `probs` that a node is; unused for the root
  SamplingLaw law;             // not greedy
  std::uint64_t seed;
  std::int64_t position;  // absolute position of the token after the root
};

// Holds the working memory: nothing is allocated once it has seen a vocabulary.
class TreeAcceptor {
 public:
  // scores_of(node) returns that node's scores after processors, [vocab_size]; it is called once
  // per node whose law is needed. On return decided[node] is the token after each node of
  // out->path and after the root: an accepted draft, and last the drawn token, or
  // TokenSampler::kBadRow / kNothingAllowed. Other entries of decided are left alone.
  template <typename ScoresOf>
  void accept(const AcceptanceInput& input, const AcceptanceParams& params, int vocab_size,
              const ScoresOf& scores_of, TokenSampler& sampler, TokenId* decided,
              AcceptResult* out) {
    if (params.rule == AcceptanceRule::kRejection) {
      walk(input, vocab_size, scores_of, sampler, decided, out);
    } else {
      find_deepest(input, params, vocab_size, scores_of, sampler, decided, out);
    }
  }

 private:
  // Node 0..size-1: its children, in order of index.
  int children(const DraftTree& tree, std::int32_t node);
  // The index in children_ of the sibling that is kept, -1: none, and `law` is the residual.
  int hold_against(const AcceptanceInput& input, std::int64_t position, int count,
                   WeightedLaw* law);
  TokenId draw_rest(const AcceptanceInput& input, std::int64_t position, const WeightedLaw& law);
  void judge(const AcceptanceInput& input, const AcceptanceParams& params, const float* scores,
             std::int32_t node, int count, const WeightedLaw& law);

  template <typename ScoresOf>
  void walk(const AcceptanceInput& input, int vocab_size, const ScoresOf& scores_of,
            TokenSampler& sampler, TokenId* decided, AcceptResult* out) {
    const DraftTree& tree = *input.tree;
    out->path_len = 0;
    for (std::int32_t node = 0;;) {
      const std::int64_t position = input.position + out->path_len;
      const int count = children(tree, node);
      if (count == 0) {
        decided[node] = draw_bonus(input, position, vocab_size, scores_of, node, sampler);
        break;
      }
      // A leaf that was never looked at: the mistake of reading one row too few.
      const bool unseen = fault(Fault::kLastDraftUnverified) && leaf(tree, children_[0]);
      const bool shifted = fault(Fault::kRowsShifted) && node + 1 < tree.size;
      const TokenId status =
          sampler.weigh(scores_of(shifted ? node + 1 : node), vocab_size, input.law);
      if (status < 0) {
        decided[node] = status;
        break;
      }
      WeightedLaw law = sampler.law();
      const int kept = unseen ? 0 : hold_against(input, position, count, &law);
      if (kept < 0) {
        decided[node] = draw_rest(input, position, law);
        break;
      }
      decided[node] = tree.tokens[children_[kept]];
      node = out->path[out->path_len++] = children_[kept];
    }
  }

  template <typename ScoresOf>
  TokenId draw_bonus(const AcceptanceInput& input, std::int64_t position, int vocab_size,
                     const ScoresOf& scores_of, std::int32_t node, TokenSampler& sampler) {
    if (fault(Fault::kBonusFromWrongRow) && node > 0) node = input.tree->parents[node];
    if (fault(Fault::kBonusArgmax) && node > 0) {
      const float* row = scores_of(node);
      return static_cast<TokenId>(std::max_element(row, row + vocab_size) - row);
    }
    return sampler.draw(scores_of(node), vocab_size, input.law,
                        token_uniform(input.seed, static_cast<std::uint64_t>(position)));
  }

  template <typename ScoresOf>
  void find_deepest(const AcceptanceInput& input, const AcceptanceParams& params, int vocab_size,
                    const ScoresOf& scores_of, TokenSampler& sampler, TokenId* decided,
                    AcceptResult* out) {
    const DraftTree& tree = *input.tree;
    std::fill_n(depth_, tree.size, -1);
    depth_[0] = 0;
    score_[0] = 1.0;
    std::int32_t best = 0;
    for (std::int32_t node = 0; node < tree.size; ++node) {
      if (depth_[node] < 0) continue;
      const bool deeper = depth_[node] > depth_[best];
      if (deeper || (depth_[node] == depth_[best] && score_[node] > score_[best])) best = node;
      const int count = children(tree, node);
      if (count == 0) continue;
      const float* scores = scores_of(node);
      if (sampler.weigh(scores, vocab_size, input.law) < 0) continue;
      judge(input, params, scores, node, count, sampler.law());
    }
    out->path_len = derive_path(tree.parents, best, out->path);
    std::int32_t node = 0;
    for (int i = 0; i < out->path_len; node = out->path[i++]) {
      decided[node] = tree.tokens[out->path[i]];
    }
    decided[best] = sampler.draw(
        scores_of(best), vocab_size, input.law,
        token_uniform(input.seed, static_cast<std::uint64_t>(input.position + out->path_len)));
  }

  static bool leaf(const DraftTree& tree, std::int32_t node) {
    for (std::int32_t i = node + 1; i < tree.size; ++i) {
      if (tree.parents[i] == node) return false;
    }
    return true;
  }

  std::int32_t children_[kMaxStepTokens] = {};
  std::int32_t columns_[kMaxStepTokens] = {};  // of earlier siblings
  std::int32_t depth_[kMaxStepTokens] = {};    // of an acceptable node, else -1
  double score_[kMaxStepTokens] = {};          // product of p along its path
};

}  // namespace specdec
