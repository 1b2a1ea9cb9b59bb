// How long a chain draft is worth verifying.
//
// The chance that the d-th draft token is accepted, given that the ones before it were, is learnt
// from what was observed: per request, leaning on all requests of the executor while a request is
// young. Drafts of longer matches are likelier, so the rates are kept per match length and depth.
// A draft that was cut short, or not verified at all, still teaches: the tokens that were emitted
// say whether it would have been right. So a length of zero recovers by itself.
#pragma once

#include <array>
#include <vector>

#include "engine/step_cost.h"

namespace specdec {

// A request forgets its own past faster than the executor forgets that of all requests.
inline constexpr double kOwnDecay = 0.95, kSharedDecay = 0.99;

class ChainRates {
 public:
  // Conditional acceptance rate at `depth` (1-based) after a match of `match_len` tokens.
  double rate(const ChainRates* shared, int match_len, int depth) const;
  void observe(int match_len, int depth, bool accepted, double decay);

 private:
  static constexpr int kMatchBuckets = 6;
  static constexpr int kDepthBuckets = 6;
  static int match_bucket(int match_len);
  static int depth_bucket(int depth);
  static double prior(int match, int depth);

  struct Count {
    double hits = 0.0, tries = 0.0;
  };
  std::array<std::array<Count, kDepthBuckets>, kMatchBuckets> counts_{};
};

// One request's chain on offer: survival[i] = chance that draft i is accepted, non-increasing.
struct ChainOffer {
  const double* survival = nullptr;
  int length = 0;
  int chosen = 0;  // out: how many drafts to verify
};

// Chooses the lengths that maximise expected tokens per second,
//   (decode requests + sum of survival of the chosen drafts) / T(base_rows + chosen drafts),
// with at most `max_extra_rows` drafts in total. Exact, because survival is non-increasing: only
// prefixes of the merged descending order can be optimal for a given number of rows.
void choose_chain_lengths(std::vector<ChainOffer>& offers, int base_rows, int decode_requests,
                          int max_extra_rows, const StepCost& cost);

}  // namespace specdec
