// Drawing a token from a row of scores: softmax(scores / temperature), cut to its likelier part.
//
// Order of the cuts: min_p (weight at least min_p times the largest), top_k (score at least the
// k-th largest; ties stay), top_p (of what is left, renormalised: the fewest tokens, likelier first
// and smaller id first on ties, whose mass reaches top_p; the one that crosses it stays).
//
// The draw is the inverse of the distribution function in order of token ids, at a uniform number
// that depends on (seed, absolute position of the token) alone. So the token is a function of the
// scores, the law and that number: not of the batch, the step, or whether a draft guessed it. An
// exact-match acceptance of drafts therefore gives the text that plain sampling gives, token for
// token, and accepts a draft token d with probability p(d), as rejection sampling of a one-hot
// proposal does.
//
// Everything that decides is an elementwise function of a score or an exact sum of integers
// (algo/law_mass.h), cuts are found by one text (algo/law_cuts.h). So a kernel that walks a row in
// another order draws the same token (cuda/accept).
#pragma once

#include <cstdint>
#include <vector>

#include "algo/law_cuts.h"
#include "algo/residual.h"
#include "algo/sampling_law.h"
#include "base/types.h"

namespace specdec {

// e^-H, H the entropy of a law whose weights came from these scores: the same number in any order
// of summation, as draws are.
double law_spread(const WeightedLaw& law, const float* scores, float temperature);

// Holds the working memory, so that a draw allocates nothing once it has seen a vocabulary.
class TokenSampler {
 public:
  // `law` is not greedy; scores [vocab_size]; u in [0, 1). kBadRow or kNothingAllowed for a row
  // that has no law.
  TokenId draw(const float* scores, int vocab_size, const SamplingLaw& law, double u);

  // The law itself, as weights, for law(): 0 where the cuts dropped a token. Returns 0, kBadRow or
  // kNothingAllowed.
  TokenId weigh(const float* scores, int vocab_size, const SamplingLaw& law);
  // What weigh() found; may be written to, valid until the next call.
  WeightedLaw law() { return law_; }

 private:
  // Fills weights_, mass_, block_best_, kept_ and law_ with the law before any cut.
  TokenId weigh_all(const float* scores, int vocab_size, const SamplingLaw& law);
  // Weights that the cut drops become 0.
  void drop(const float* scores, const SamplingLaw& law, const LawCut& cut);

  // The row of algo/law_cuts.h; its list is in order of ids.
  class CutRow;
  std::vector<float> weights_;     // [V] exp((score - largest) / temperature)
  std::vector<Mass> mass_;         // of each block of ids
  std::vector<float> block_best_;  // largest score of each block
  std::vector<float> order_;       // scratch of the list's threshold
  std::int32_t kept_ = 0;          // tokens of some weight that min_p keeps
  std::vector<Candidate> list_;
  WeightedLaw law_{};
};

}  // namespace specdec
