// Inputs in 8 bits: a row of x as e4m3 numbers and one scale, the row's largest magnitude over the
// largest number, as FP8 checkpoints' "dynamic per-token" activations have it. One text, so that
// every backend multiplies the same numbers. Internal linkage: the CPU's rows compile it for
// several instruction sets (row_ops_impl.h).
#pragma once

#include <bit>
#include <cstdint>

#include "base/types.h"

namespace specdec {

inline constexpr float kE4m3Largest = 448.0f;

// The scale of a row by the largest of its magnitudes. At least 2^-100, so that nothing is divided
// by 0. If the largest is no number, or infinity, so is the scale, and some quotient is NaN.
SPECDEC_HD static inline float e4m3_scale(float largest) {
  const float scale = largest / kE4m3Largest;
  return scale < 0x1p-100f ? 0x1p-100f : scale;
}

// The e4m3 number next to x / scale, ties to even: a magnitude of kE4m3Largest at most, but for the
// rounding of the quotient. Branch-free: a sum whose last place is what e4m3 has there, and back.
SPECDEC_HD static inline float e4m3_nearest(float value) {
  const std::uint32_t exponent = std::bit_cast<std::uint32_t>(value) >> 23 & 0xffu;
  const std::uint32_t least = 127 - 6;  // below it numbers are multiples of 2^-9
  const float offset =
      std::bit_cast<float>(((exponent < least ? least : exponent) + 20) << 23 | 0x400000u);
  return (value + offset) - offset;
}

}  // namespace specdec
