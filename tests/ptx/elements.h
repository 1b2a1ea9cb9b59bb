// Numbers of 16 and 8 bits, from their definitions: no code of CUDA's headers or of the emulator.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace ptx {

enum class Element : std::uint8_t { bf16, f16, e4m3 };

inline float widened(Element type, unsigned bits) {
  if (type == Element::bf16) return std::bit_cast<float>(bits << 16);
  if (type == Element::f16) return float(std::bit_cast<_Float16>(std::uint16_t(bits)));
  // e4m3: a sign, four bits of exponent with a bias of 7, three of fraction; no infinity.
  const float sign = bits & 0x80 ? -1.0f : 1.0f;
  const int exponent = int(bits >> 3 & 15), fraction = int(bits & 7);
  if ((bits & 0x7f) == 0x7f) return std::copysign(NAN, sign);
  if (exponent == 0) return sign * std::ldexp(float(fraction), -9);
  return sign * std::ldexp(float(8 + fraction), exponent - 10);
}

// To the nearest, ties to even.
inline std::uint16_t narrow16(Element type, float x) {
  if (std::isnan(x)) return 0x7fff;
  if (type == Element::f16) return std::bit_cast<std::uint16_t>(_Float16(x));
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// a b + c rounded once: the sum in double, then in float, keeps in its last bit that something was
// lost, so that the last rounding sees it.
inline std::uint16_t fma16(Element type, std::uint16_t a, std::uint16_t b, std::uint16_t c) {
  const double product = double(widened(type, a)) * widened(type, b), added = widened(type, c);
  double sum = product + added;
  if (!std::isfinite(sum)) return narrow16(type, float(sum));
  const double part = sum - product, lost = (product - (sum - part)) + (added - part);
  auto bits = std::bit_cast<std::uint64_t>(sum);
  if (lost != 0 && bits % 2 == 0) bits += (lost > 0) == (sum > 0) ? 1 : -1;
  const auto kept = float(std::bit_cast<double>(bits & ~((1ull << 29) - 1)));
  const bool inexact = bits % (1ull << 29) != 0;
  return narrow16(type, std::bit_cast<float>(std::bit_cast<std::uint32_t>(kept) | inexact));
}
// The same as narrow16; what is too large becomes the largest, 448.
inline std::uint8_t narrow_e4m3(float x) {
  const unsigned sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return 0x7f;
  const float size = std::fabs(x);
  if (size == 0) return std::uint8_t(sign);
  if (size >= 448) return std::uint8_t(sign | 0x7e);
  int exponent;
  std::frexp(size, &exponent);                  // size = f * 2^exponent, f in [1/2, 1)
  const int step = std::max(exponent - 4, -9);  // distance of neighbours: 2^step
  const int steps = int(std::nearbyint(std::ldexp(size, -step)));
  if (step == -9) return std::uint8_t(sign | unsigned(steps));  // 8 steps are the first normal
  // steps is 8..16: a 16 carries into the exponent by itself.
  return std::uint8_t(sign | unsigned((step + 10) * 8 + steps - 8));
}

// e5m2 is the high byte of an f16, rounded to it; what is too large becomes the largest, 57344.
inline std::uint8_t narrow_e5m2(float x) {
  const unsigned sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return 0x7f;
  const float size = std::fabs(x);
  if (size == 0) return std::uint8_t(sign);
  if (size >= 57344) return std::uint8_t(sign | 0x7b);
  int exponent;
  std::frexp(size, &exponent);
  const int step = std::max(exponent - 3, -16);
  const int steps = int(std::nearbyint(std::ldexp(size, -step)));
  if (step == -16) return std::uint8_t(sign | unsigned(steps));
  return std::uint8_t(sign | unsigned((step + 17) * 4 + steps - 4));
}

}  // namespace ptx
