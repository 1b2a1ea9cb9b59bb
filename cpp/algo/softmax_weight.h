// The exponential function of softmax: one text, so that every user sees the same numbers. Products
// and sums round one by one, on the host (no contraction, CMakeLists.txt) as on a device
// (-fmad=false where a kernel uses this): fused ones would differ in the last bit.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "base/types.h"

namespace specdec {

// e^z for z <= 0 with a relative error below 1e-6, 0 below -87. Branch-free, so that the loop over
// a vocabulary becomes vector code on any machine, and the same numbers come out of all of them.
SPECDEC_HD inline float softmax_weight(float z) {
  const float bounded = z < -87.0f ? -87.0f : z;
  const auto n = static_cast<std::int32_t>(bounded * 1.44269504f - 0.5f);  // the nearest: z <= 0
  // ln 2 in two parts: the first is exact times any n.
  const float r =
      (bounded - static_cast<float>(n) * 0.693359375f) + static_cast<float>(n) * 2.12194440e-4f;
  float p = 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const float power = std::bit_cast<float>((n + 127) << 23);
  const float weight = p * power;
  return z < -87.0f ? 0.0f : weight;
}

// A score's distance from the row's largest, in units of the temperature: at most 0. 0 by hand: the
// smallest temperatures overflow elsewhere, never there.
SPECDEC_HD inline float law_exponent(float score, float best, float inverse_temperature) {
  const float z = (score - best) * inverse_temperature;
  return score == best ? 0.0f : z;
}

// e^x for x <= 0 to a few units of the last place, 0 below -700: for what is compared in float64.
SPECDEC_HD inline double exp_of(double x) {
  if (x < -700.0) return 0.0;
  const auto n = static_cast<std::int32_t>(x * 1.4426950408889634 - 0.5);
  const double r = (x - n * 0.693145751953125) - n * 1.42860682030941723212e-6;
  double p = 1.0;
  for (std::int32_t i = 13; i >= 1; --i) p = 1.0 + p * r / i;
  return p * std::bit_cast<double>(static_cast<std::int64_t>(n + 1023) << 52);
}

}  // namespace specdec
