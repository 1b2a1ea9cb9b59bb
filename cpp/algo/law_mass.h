// Weights of tokens as multiples of one unit, so that sums of them are exact.
//
// A weight is a float32 that is a multiple of 2^-43 (a row's largest weight is 1), its mass the
// integer that multiple. Sums of masses are integers below 2^64 for any vocabulary served, so they
// do not depend on the order of the terms: a thread, a warp and a grid find the same total, the
// same prefix sums and therefore the same token. Rounding to the grid moves a weight by at most
// 2^-44; a token less than 6e-14 times as likely as the likeliest one may get mass 0.
#pragma once

#include <cstdint>

#include "algo/softmax_weight.h"
#include "base/types.h"

namespace specdec {

using Mass = std::uint64_t;

inline constexpr double kMassUnit = 0x1p-43;
// Largest vocabulary: 2^20 weights of at most 2 (a drafter's probabilities) stay below 2^64.
inline constexpr std::int32_t kMaxLawTokens = 1 << 20;

// The nearest multiple of the unit. Weights from 2^-20 on are multiples already. Both sides are
// computed: a compiler makes vector code of a choice between values, not of one between sums.
SPECDEC_HD inline float to_grid(float weight) {
  const float rounded = (weight + 0x1p-20f) - 0x1p-20f;
  return weight < 0x1p-20f ? rounded : weight;
}

// `weight` is on the grid. The product is exact: a power of two.
SPECDEC_HD inline Mass mass_of(float weight) { return static_cast<Mass>(weight * 0x1p43f); }

SPECDEC_HD inline double weight_of(Mass mass) { return static_cast<double>(mass) * kMassUnit; }

// Where u in [0, 1) falls among `total` units.
SPECDEC_HD inline Mass drawn_unit(double u, Mass total) {
  const auto unit = static_cast<Mass>(u * static_cast<double>(total));
  return unit < total ? unit : total - 1;
}

// The mass that the tokens kept by top_p have to reach, of `total` > 0.
SPECDEC_HD inline Mass wanted_mass(float top_p, Mass total) {
  const double wanted = static_cast<double>(top_p) * static_cast<double>(total);
  const auto floor = static_cast<Mass>(wanted);
  const Mass up = floor + (static_cast<double>(floor) < wanted ? 1 : 0);
  return up < 1 ? 1 : up > total ? total : up;
}

// A term of the entropy: weight * -z, with weight = e^z; at most 1/e.
SPECDEC_HD inline Mass entropy_mass(float weight, float z) {
  return static_cast<Mass>(static_cast<double>(weight) * -static_cast<double>(z) * 0x1p43);
}

// e^-H = e^(sum of p z) / total weight, for p = e^z / total.
SPECDEC_HD inline double spread_of(Mass terms, Mass total) {
  return exp_of(-(static_cast<double>(terms) / static_cast<double>(total))) / weight_of(total);
}

}  // namespace specdec
