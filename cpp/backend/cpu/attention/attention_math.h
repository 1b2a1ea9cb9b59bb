// Vector helpers of attention_impl.h: elements, e^x, tanh. Included once per
// instruction set, in an anonymous namespace so that the linker cannot mix the versions.
//
// V is the instruction set: V::W lanes, V::F and V::I vectors, fma, widen_*, load_half,
// load_transposed.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace specdec::cpu {
namespace {

// Fetches a line that is read soon into the second-level cache: measured to be faster than into the
// first (docs/kernels/cpu_attention.md). Always inline: GCC takes a function that only prefetches
// for one without effect.
__attribute__((always_inline)) inline void fetch_line(const void* p) {
  __builtin_prefetch(p, 0, 2);
}

// Storage types of 8 and 16 bits, told apart by the type system.
struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};
struct E4m3 {
  std::uint8_t bits;
};
struct Int8 {  // a vector of them is followed by its float32 scale
  std::int8_t value;
};

// Conversions in branch-free form, so that loops over them vectorise. Nearest even.
inline std::uint16_t f32_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

inline std::uint16_t f32_to_f16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Below 2^-14, adding 0.5 leaves the rounded multiple of 2^-24 in the mantissa.
  const float small = std::bit_cast<float>(magnitude) + 0.5f;
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(small) - 0x3f000000u;
  const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  std::uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return static_cast<std::uint16_t>(sign | half);
}

[[maybe_unused]] inline float f16_to_f32(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  const float small = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
  const std::uint32_t normal = (magnitude << 13) + 0x38000000u;
  const std::uint32_t special = 0x7f800000u | ((magnitude & 0x3ffu) << 13);
  std::uint32_t bits = magnitude < 0x0400u ? std::bit_cast<std::uint32_t>(small) : normal;
  bits = magnitude >= 0x7c00u ? special : bits;
  return std::bit_cast<float>(sign | bits);
}

template <typename V>
inline typename V::F load(const float* x) {
  typename V::F v;
  std::memcpy(&v, x, sizeof(v));
  return v;
}
template <typename V>
inline typename V::F load(const Bf16* x) {
  return V::widen_bf16(&x->bits);
}
template <typename V>
inline typename V::F load(const F16* x) {
  return V::widen_f16(&x->bits);
}
template <typename V>
inline void store(float* x, typename V::F v) {
  std::memcpy(x, &v, sizeof(v));
}
// As numbers that a factor is still missing from (SlotReader::factor): of e4m3 that is 2^8 times
// the scale, because its bits are those of a float16 2^8 times smaller.
template <typename V>
inline typename V::F load(const E4m3* x) {
  return V::widen_e4m3(&x->bits);
}
template <typename V>
inline typename V::F load(const Int8* x) {
  return V::widen_int8(&x->value);
}
inline constexpr float kE4m3Factor = 256.0f;

// Stored numbers [begin, end) of a vector of `n` as float32, in whole vectors from `begin` on.
// Exact but for the one rounding of an 8-bit number times its factor.
template <typename V, typename T>
inline void widen_row(const T* from, float factor, int begin, int end, int n, float* to) {
  for (int d = begin; d < end; d += V::W) {
    typename V::F x = d + V::W <= n ? load<V>(from + d) : V::load_half(from + d);
    if constexpr (sizeof(T) == 1) x *= factor;
    store<V>(to + d, x);
  }
}

template <typename V>
inline typename V::F broadcast(float x) {
  return x - typename V::F{};  // x - (+0) is x, also for -0
}

inline void store_element(float* out, float value) { *out = value; }
inline void store_element(Bf16* out, float value) { out->bits = f32_to_bf16(value); }
inline void store_element(F16* out, float value) { out->bits = f32_to_f16(value); }

template <typename V>
inline typename V::F max_lane(typename V::F a, typename V::F b) {
  return a > b ? a : b;
}

// e^x for x <= 0, below 1 ulp of error besides rounding; 0 below -87 (so for -inf), NaN for NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2; the polynomial interpolates (e^r - 1 - r) / r^2 at Chebyshev
// points.
template <typename V>
inline typename V::F exp_nonpositive(typename V::F x) {
  using F = typename V::F;
  using I = typename V::I;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const F shifted = V::fma(x, broadcast<V>(1.44269504f), broadcast<V>(kMagic));
  const F n = shifted - kMagic;
  F r = V::fma(n, broadcast<V>(-0.693359375f), x);  // exact: 0.693359375 has 10 bits
  r = V::fma(n, broadcast<V>(2.12194440e-4f), r);   // the rest of ln 2
  F p = broadcast<V>(1.98909911e-4f);
  p = V::fma(p, r, broadcast<V>(1.39336498e-3f));
  p = V::fma(p, r, broadcast<V>(8.33331048e-3f));
  p = V::fma(p, r, broadcast<V>(4.16664667e-2f));
  p = V::fma(p, r, broadcast<V>(1.66666672e-1f));
  p = V::fma(p, r, broadcast<V>(0.5f));
  p = V::fma(p, r * r, r) + 1.0f;
  const I exponent = (reinterpret_cast<I>(shifted) - std::bit_cast<std::int32_t>(kMagic) + 127)
                     << 23;
  const F value = p * reinterpret_cast<F>(exponent);
  return x < -87.0f ? F{} : value;
}

// tanh: an odd polynomial near 0, where 1 - e^(-2|x|) would cancel, else the exponential.
template <typename V>
inline typename V::F tanh(typename V::F x) {
  using F = typename V::F;
  const F size = x < 0.0f ? -x : x;
  const F e = exp_nonpositive<V>(size * -2.0f);
  const F far = (1.0f - e) / (1.0f + e);
  const F z = x * x;
  F p = broadcast<V>(2.29274482e-3f);
  p = V::fma(p, z, broadcast<V>(-8.34394526e-3f));
  p = V::fma(p, z, broadcast<V>(2.17689183e-2f));
  p = V::fma(p, z, broadcast<V>(-5.39592579e-2f));
  p = V::fma(p, z, broadcast<V>(1.33333042e-1f));
  p = V::fma(p, z, broadcast<V>(-3.33333343e-1f));
  const F near = V::fma(p * z, x, x);
  return size < 0.625f ? near : (x < 0.0f ? -far : far);
}

// Sum and maximum of the lanes, by halves: a fixed tree.
template <typename V>
inline float sum_lanes(typename V::F v) {
  float lanes[V::W];
  store<V>(lanes, v);
  for (int width = V::W / 2; width >= 1; width /= 2) {
    for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}
template <typename V>
inline float max_lanes(typename V::F v) {
  float lanes[V::W];
  store<V>(lanes, v);
  float best = lanes[0];
  for (int j = 1; j < V::W; ++j) best = lanes[j] > best ? lanes[j] : best;
  return best;
}

}  // namespace
}  // namespace specdec::cpu
