// The second bodies of cuda/gpu/rounding.cuh.
#pragma once

#include <cmath>

namespace specdec::gpu {

// a * b is exact in float64 and the error of its sum with c is computed, so a float that lies
// farther from zero than the exact value is seen, and the one before it taken. Not for overflow.
inline float fma_towards_zero(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b), other = c;
  const double sum = product + other, back = sum - product;
  const double rest = (product - (sum - back)) + (other - back);
  const float to = static_cast<float>(sum);
  const double over = (static_cast<double>(to) - sum) - rest;
  return (to > 0.0f && over > 0.0) || (to < 0.0f && over < 0.0) ? std::nextafterf(to, 0.0f) : to;
}
inline float add_towards_zero(float a, float b) { return fma_towards_zero(a, 1.0f, b); }

}  // namespace specdec::gpu
