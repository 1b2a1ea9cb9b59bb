// The exponential function of softmax: one text, so that every user sees the same numbers.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace specdec {

// e^z for z <= 0 with a relative error below 1e-6, 0 below -87. Branch-free, so that the loop over
// a vocabulary becomes vector code on any machine, and the same numbers come out of all of them.
inline float softmax_weight(float z) {
  const float bounded = std::max(z, -87.0f);
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
  return z < -87.0f ? 0.0f : p * power;
}

}  // namespace specdec
