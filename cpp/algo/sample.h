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
#pragma once

#include <cstdint>
#include <vector>

#include "algo/residual.h"
#include "base/philox.h"
#include "base/types.h"

namespace specdec {

struct SamplingLaw {
  float temperature = 0.0f;  // 0: the largest score, the first on ties
  std::int32_t top_k = 0;    // 0: all
  float top_p = 1.0f;        // (0, 1]
  float min_p = 0.0f;        // [0, 1]

  bool greedy() const { return temperature == 0.0f; }
  bool cuts() const { return top_k != 0 || top_p < 1.0f || min_p > 0.0f; }
};

// The number that decides the token at an absolute position, in [0, 1).
inline double token_uniform(std::uint64_t seed, std::uint64_t position) {
  return philox_uniform(seed, position, RandomPurpose::kToken, 0);
}

// Holds the working memory, so that a draw allocates nothing once it has seen a vocabulary.
class TokenSampler {
 public:
  static constexpr TokenId kBadRow = -1;          // a NaN, or +infinity
  static constexpr TokenId kNothingAllowed = -2;  // every score is -infinity

  // `law` is not greedy; scores [vocab_size]; u in [0, 1).
  TokenId draw(const float* scores, int vocab_size, const SamplingLaw& law, double u);

  // The law itself, as weights, for law(): 0 where the cuts dropped a token. Returns 0, kBadRow or
  // kNothingAllowed.
  TokenId weigh(const float* scores, int vocab_size, const SamplingLaw& law);
  // What weigh() found; may be written to, valid until the next call.
  WeightedLaw law() { return law_; }

 private:
  struct Candidate {
    float score, weight;
    TokenId id;
  };
  // Fills weights_, mass_ and law_ with the law before any cut.
  TokenId weigh_all(const float* scores, int vocab_size, float temperature);
  // Fills kept_ with what the cuts leave, in order of ids.
  void cut(const float* scores, int vocab_size, const SamplingLaw& law);
  void gather(const float* scores, int vocab_size, const SamplingLaw& law);
  float gather_threshold(const float* scores, int vocab_size, const SamplingLaw& law);
  void cut_top_k(std::int32_t k);
  void cut_top_p(double wanted_mass);
  TokenId draw_from_kept(double u) const;

  std::vector<float> weights_;     // [V] exp((score - largest) / temperature)
  std::vector<double> mass_;       // of each block of ids
  std::vector<float> block_best_;  // largest score of each block, scratch of the top-k threshold
  std::vector<Candidate> kept_;
  WeightedLaw law_{};
};

}  // namespace specdec
