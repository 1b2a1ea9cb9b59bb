// How a request turns scores into a law. What the cuts do: algo/sample.h.
#pragma once

#include <cstdint>

#include "base/philox.h"
#include "base/types.h"

namespace specdec {

struct SamplingLaw {
  float temperature = 0.0f;  // 0: the largest score, the first on ties
  std::int32_t top_k = 0;    // 0: all
  float top_p = 1.0f;        // (0, 1]
  float min_p = 0.0f;        // [0, 1]

  SPECDEC_HD bool greedy() const { return temperature == 0.0f; }
  SPECDEC_HD bool cuts() const { return top_k != 0 || top_p < 1.0f || min_p > 0.0f; }
  // False for a NaN in any place.
  SPECDEC_HD bool valid() const {
    return temperature >= 0.0f && temperature <= 3.4e38f && top_k >= 0 && top_p > 0.0f &&
           top_p <= 1.0f && min_p >= 0.0f && min_p <= 1.0f;
  }
};

// What a draw answers for a row without a law.
inline constexpr TokenId kBadRow = -1;          // a NaN, or +infinity
inline constexpr TokenId kNothingAllowed = -2;  // every score is -infinity

// The number that decides the token at an absolute position, in [0, 1).
SPECDEC_HD inline double token_uniform(std::uint64_t seed, std::uint64_t position) {
  return philox_uniform(seed, position, RandomPurpose::kToken, 0);
}

}  // namespace specdec
