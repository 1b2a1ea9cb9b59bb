// float8 e4m3 (the "fn" form: no infinity, 0x7f is NaN) as bit patterns.
#pragma once

#include <bit>
#include <cstdint>

namespace specdec {

inline constexpr float kMaxE4M3 = 448.0f;

// Nearest even; what is larger than 448, infinity included, becomes 448; a NaN stays a NaN.
inline std::uint8_t float_to_e4m3(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint8_t>(sign | 0x7fu);
  if (magnitude >= std::bit_cast<std::uint32_t>(kMaxE4M3)) {
    return static_cast<std::uint8_t>(sign | 0x7eu);
  }
  if (magnitude < std::bit_cast<std::uint32_t>(0x1p-6f)) {
    // Subnormal: adding 2^14 leaves the multiple of 2^-9, rounded, in the mantissa.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<std::uint8_t>(
        sign | (std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0x1p14f)));
  }
  const std::uint32_t rounded = magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u);
  return static_cast<std::uint8_t>(sign | (rounded >> 20));
}

inline float e4m3_to_float(std::uint8_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24,
                      magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude < 8u) {  // zero, subnormal: a multiple of 2^-9
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + 0x3c000000u));
}

}  // namespace specdec
