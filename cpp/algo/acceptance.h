// Acceptance of drafts by probabilities: the rules besides exact match (algo/accept.h).
//
// All start from the request's own law after each node: its scores along that node's path, with
// processors, temperature and cuts. p is that law, q what a draft was drawn from.
//
//   rejection  lossless. Recursive rejection over siblings (algo/residual.h); the token after the
//              path is drawn from what the rejected drafts left, or from p.
//   typical    LOSSY (Cai et al. 2024, Medusa). A draft is kept if its p is at least
//              min(posterior_threshold, posterior_alpha * exp(-entropy of p)).
//   threshold  LOSSY. A draft is kept if p / q is at least the threshold; q = 1 without probs.
//   best_beam  LOSSY (Cheng et al. 2024, ReDrafter). Every draft is kept with probability
//              min(1, p / q), the deepest path of kept drafts stays, the first on ties.
//
// Typical and threshold keep the deepest path of such drafts, the one of the largest product of p
// on ties, then of the smallest index; the token after it is drawn from p.
//
// Drafts that were chosen without chance (no probs) need no rule of their own to be lossless: the
// token drawn from p decides. It equals draft d with probability p(d), and given that it does not
// it has the law of p with d left out: that is the rejection rule for such drafts, in one draw that
// depends on nothing but seed and position (algo/sample.h).
//
// Numbers: Philox of (seed, absolute position of the draft, kAccept, index among its siblings), and
// of (seed, position, kToken) for the draw.
//
// The rules themselves are in algo/accept_rules.h, one text for the host and for CUDA; here is what
// they see of a law on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "algo/accept_rules.h"
#include "algo/draft_probs.h"
#include "algo/sample.h"
#include "base/types.h"
#include "tree/draft_tree.h"

namespace specdec {

// One request's drafts in front of acceptance.
struct AcceptanceInput {
  const DraftTree* tree;
  const DraftProbs* probs;     // null or not given: drafts were chosen without chance
  const std::int32_t* source;  // [tree->size] draft of `probs` that a node is; unused for the root
  SamplingLaw law;             // not greedy
  std::uint64_t seed;
  std::int64_t position;  // absolute position of the token after the root
};

// The laws of a request's rows, for the rules. scores_of(node): the node's scores after processors.
template <typename ScoresOf>
class HostLaws {
 public:
  HostLaws(const AcceptanceInput& input, int vocab_size, const ScoresOf& scores_of,
           TokenSampler& sampler)
      : input_(input), vocab_size_(vocab_size), scores_of_(scores_of), sampler_(sampler) {}

  TokenId weigh(std::int32_t node) {
    const bool shifted = fault(Fault::kRowsShifted) && node + 1 < input_.tree->size;
    scores_ = scores_of_(shifted ? node + 1 : node);
    const TokenId status = sampler_.weigh(scores_, vocab_size_, input_.law);
    law_ = sampler_.law();
    residual_ = false;
    return status;
  }
  double weight(TokenId token) const { return static_cast<double>(law_.weights[token]); }
  double total() const { return weight_of(law_.total); }
  DraftLaw draft(std::int32_t node) const { return input_.probs->law(input_.source[node]); }
  bool has_probs() const { return input_.probs != nullptr && input_.probs->given(); }
  bool replacement() const { return input_.probs->replacement; }
  void subtract(const DraftLaw& q, double mass) {
    subtract_draft(SerialTeam{}, q, mass, &law_);
    residual_ = true;
  }
  TokenId draw(double u) {
    if (fault(Fault::kSoftmaxOfResidual) && residual_) exponentiate();
    return draw_from_law(law_, u);
  }
  TokenId sample(std::int32_t node, double u) {
    if (fault(Fault::kBonusFromWrongRow) && node > 0) node = input_.tree->parents[node];
    const float* scores = scores_of_(node);
    if (fault(Fault::kBonusArgmax) && node > 0) {
      return static_cast<TokenId>(std::max_element(scores, scores + vocab_size_) - scores);
    }
    return sampler_.draw(scores, vocab_size_, input_.law, u);
  }
  double spread() const { return law_spread(law_, scores_, input_.law.temperature); }
  TokenId favourite() const {
    return static_cast<TokenId>(std::max_element(law_.weights, law_.weights + law_.vocab_size) -
                                law_.weights);
  }

 private:
  void exponentiate() {
    for (std::int32_t v = 0; v < law_.vocab_size; ++v) {
      const double x = static_cast<double>(law_.weights[v]) / total();
      law_.weights[v] = to_grid(static_cast<float>(std::exp(x - 1.0)));
    }
    sum_law(SerialTeam{}, &law_);
  }

  const AcceptanceInput& input_;
  int vocab_size_;
  const ScoresOf& scores_of_;
  TokenSampler& sampler_;
  const float* scores_ = nullptr;
  WeightedLaw law_{};
  bool residual_ = false;
};

// Holds the working memory: nothing is allocated once it has seen a vocabulary.
class TreeAcceptor {
 public:
  // scores_of(node) returns that node's scores after processors, [vocab_size]; it is called once
  // per node whose law is needed. On return decided[node] is the token after each node of
  // out->path and after the root: an accepted draft, and last the drawn token, or
  // kBadRow / kNothingAllowed. Other entries of decided are left alone, except by
  // exact match, which leaves what it drew at nodes that were kept outside the path.
  template <typename ScoresOf>
  void accept(const AcceptanceInput& input, const AcceptanceParams& params, int vocab_size,
              const ScoresOf& scores_of, TokenSampler& sampler, TokenId* decided,
              AcceptResult* out) {
    HostLaws<ScoresOf> laws(input, vocab_size, scores_of, sampler);
    const DraftTree& tree = *input.tree;
    const DraftedTree drafted{tree.tokens, tree.parents, tree.size, input.seed, input.position};
    accept_by_rule(SerialTeam{}, drafted, params, laws, &scratch_, decided, out);
  }

 private:
  AcceptScratch scratch_;
};

}  // namespace specdec
