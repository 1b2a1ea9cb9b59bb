// What a draft model proposes behind one row of its scores.
//
//   best     the likeliest token: for greedy requests
//   coupled  the draw of TokenSampler at the uniform number that the target will use at the same
//            position: where the two models agree on a distribution they draw the same token, and
//            an exact-match acceptance takes it
//   own      a draw from q, the request's law applied to the draft's scores (TokenSampler::weigh),
//            with q written out: for acceptance by probabilities, which is exact only if q is what
//            was drawn from
#pragma once

#include <cstdint>
#include <vector>

#include "algo/sample.h"
#include "base/types.h"

namespace specdec {

struct DraftChoice {
  std::int32_t column = -1;  // of the scores; -1: the row holds a NaN or an infinity
  float confidence = 0.0f;   // see DraftChooser's functions
};

// Holds the working memory of one thread.
class DraftChooser {
 public:
  // The first largest score; confidence: its share of softmax(scores).
  DraftChoice best(const float* scores, int n);
  // Confidence: the token's share of softmax(scores / temperature).
  DraftChoice coupled(const float* scores, int n, const SamplingLaw& law, double u);
  // q [n]: softmax(scores / temperature) behind the law's cuts. Confidence: the largest of q, which
  // does not depend on what was drawn, so that stopping for lack of it leaves q what it is.
  DraftChoice own(const float* scores, int n, const SamplingLaw& law, double u, float* q);
  // The k likeliest columns, likelier first, smaller column first on ties; confidence: their shares
  // of softmax(scores). Empty for a bad row.
  void top(const float* scores, int n, int k, std::vector<DraftChoice>* out);

 private:
  // Fills weights_ with e^((score - largest) / temperature); returns the column of the largest
  // score (the first), -1 for a bad row.
  int weigh(const float* scores, int n, float temperature);
  double total(int n) const;

  std::vector<float> weights_;       // [n]
  std::vector<std::int32_t> order_;  // of the columns
  TokenSampler sampler_;
};

}  // namespace specdec
