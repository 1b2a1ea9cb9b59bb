// The text of every RowOps table. Included once per instruction set by row_ops_*.cc, inside an
// anonymous namespace so that the linker cannot mix the versions; the compiler vectorises it.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "algo/e4m3_row.h"
#include "backend/cpu/decoder/row_ops.h"

namespace specdec::cpu {
namespace {

constexpr int kSumLanes = 16;
typedef float SumVec __attribute__((vector_size(kSumLanes * sizeof(float))));

// Vectors for what the compiler does badly by itself: loops that clamp or sum, and vectors wider
// than the machine's where they are compared or permuted. With GCC they are as wide as the widest
// of the file's flags; elsewhere they may be narrower.
constexpr int kLanes = __BIGGEST_ALIGNMENT__ / sizeof(float);
typedef float FloatVec __attribute__((vector_size(kLanes * sizeof(float))));
typedef std::int32_t IntVec __attribute__((vector_size(kLanes * sizeof(std::int32_t))));

// Conversions again (half.h has them as inline functions of external linkage, which must not be
// emitted from a file with wider instructions).
inline std::uint16_t to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

inline std::uint16_t to_f16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Below 2^-14 the sum with 0.5 leaves the multiple of 2^-24, rounded, in the mantissa.
  const float small = std::bit_cast<float>(magnitude) + 0.5f;
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(small) - 0x3f000000u;
  const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  std::uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and more round to infinity
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return static_cast<std::uint16_t>(sign | half);
}

inline float from_f16(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  const float small = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
  const std::uint32_t normal = (magnitude << 13) + 0x38000000u;
  const std::uint32_t special = 0x7f800000u | ((magnitude & 0x3ffu) << 13);
  std::uint32_t bits = magnitude < 0x0400u ? std::bit_cast<std::uint32_t>(small) : normal;
  bits = magnitude >= 0x7c00u ? special : bits;
  return std::bit_cast<float>(sign | bits);
}

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
// Where a vector's largest magnitude is above this, 127 / magnitude and magnitude / 127 are normal.
constexpr float kZero = 1e-30f;

// What numbers have in common that are rounded to -127..127: their largest magnitude over 127, and
// the factor that rounds; both 0 where all are nearly zero, or one is not finite.
struct Scale8 {
  float scale, inverse;
  bool is_finite;
};

inline Scale8 scale_of(const float* __restrict x, std::int64_t n) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  const float magnitude = std::bit_cast<float>(largest);
  const bool is_finite = largest < 0x7f800000u;
  const bool is_zero = !is_finite || magnitude <= kZero;
  return {is_zero ? 0.0f : magnitude / 127.0f, is_zero ? 0.0f : 127.0f / magnitude, is_finite};
}

// kLanes elements times the factor, to the nearest whole numbers.
inline IntVec rounded(const float* x, float factor) {
  FloatVec v;
  std::memcpy(&v, x, sizeof(v));
  const FloatVec shifted = v * factor + kMagic;
  return reinterpret_cast<IntVec>(shifted) - std::bit_cast<std::int32_t>(kMagic);
}

template <int kDistance, int... kLane>
inline IntVec add_lanes_apart(IntVec v, std::integer_sequence<int, kLane...>) {
  return v + __builtin_shufflevector(v, v, (kLane ^ kDistance)...);
}
// By halves: the compiler would take a loop over the lanes out of the vector one by one.
template <int kDistance = kLanes / 2>
inline std::int32_t sum_of(IntVec v) {
  if constexpr (kDistance == 0) {
    return v[0];
  } else {
    return sum_of<kDistance / 2>(
        add_lanes_apart<kDistance>(v, std::make_integer_sequence<int, kLanes>()));
  }
}

// 32 elements as one block; see QuantBlock. Whether a second one is needed.
inline bool quantize_block(const float* __restrict x, QuantBlock* __restrict out) {
  const Scale8 scale = scale_of(x, 32);
  if (!scale.is_finite) {
    *out = QuantBlock{};
    out->scale = out->scaled_sum = __builtin_nanf("");
    return false;
  }
  IntVec lows = {}, highs = {}, square_sums = {};
  std::int32_t q[32];
#pragma GCC unroll 8
  for (int i = 0; i < 32; i += kLanes) {
    const IntVec some = rounded(x + i, scale.inverse);
    (i < 16 ? lows : highs) += some;
    square_sums += some * some;
    std::memcpy(q + i, &some, sizeof(some));
  }
  for (int i = 0; i < 32; ++i) out->q[i] = static_cast<std::int8_t>(q[i]);
  const std::int32_t low = sum_of(lows), high = sum_of(highs), squares = sum_of(square_sums);
  out->scale = scale.scale;
  out->scaled_sum = out->scale * static_cast<float>(low + high);
  out->minus_sum = -(low + high);
  out->minus_low_sum = static_cast<std::int16_t>(-low);
  out->has_rest = 0;
  return scale.scale > 0.0f && needs_rest(squares);
}

// 32 elements as out[0] and, where QuantBlock asks for it, out[1].
inline void quantize(const float* __restrict x, QuantBlock* __restrict out) {
  if (!quantize_block(x, out)) return;
  out->has_rest = 1;
  float rest[32];
  for (int i = 0; i < 32; ++i) rest[i] = x[i] - out->scale * static_cast<float>(out->q[i]);
  quantize_block(rest, out + 1);
}

inline void put(float value, float* out) { *out = value; }
inline void put(float value, std::uint16_t* out) { *out = to_bf16(value); }

// e^x to about 1 ulp for x in [-87, 88]; clamped outside, which no sigmoid can tell. NaN stays NaN.
// Cody-Waite reduction and the degree-6 minimax polynomial of Cephes' expf.
inline FloatVec exp_clamped(FloatVec x) {
  x = x < -87.0f ? FloatVec{} - 87.0f : x;
  x = x > 88.0f ? FloatVec{} + 88.0f : x;
  const FloatVec shifted = x * 1.44269504088896341f + kMagic;
  const FloatVec n = shifted - kMagic;
  const FloatVec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  FloatVec p = FloatVec{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r * r + r) + 1.0f;
  const IntVec exponent =
      (reinterpret_cast<IntVec>(shifted) - std::bit_cast<std::int32_t>(kMagic) + 127) << 23;
  return p * reinterpret_cast<FloatVec>(exponent);
}

struct Silu {
  static FloatVec of(FloatVec x) { return x / (1.0f + exp_clamped(-x)); }
};

// 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  static FloatVec of(FloatVec x) {
    const FloatVec u = 0.79788456080286536f * (x + 0.044715f * (x * x * x));
    return x / (1.0f + exp_clamped(-2.0f * u));
  }
};

float sum_of_squares(const float* x, std::int64_t n) {
  SumVec sum = {};
  std::int64_t i = 0;
  for (; i + kSumLanes <= n; i += kSumLanes) {
    SumVec v;
    std::memcpy(&v, x + i, sizeof(v));
    sum += v * v;
  }
  if (i < n) {
    SumVec v = {};
    std::memcpy(&v, x + i, static_cast<std::size_t>(n - i) * sizeof(float));
    sum += v * v;
  }
  float lanes[kSumLanes];
  std::memcpy(lanes, &sum, sizeof(lanes));
  for (int width = kSumLanes / 2; width >= 1; width /= 2) {
    for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

template <typename Out>
void rms_norm(const float* x, const float* weight, std::int64_t n, float eps, Out* out) {
  const float mean = sum_of_squares(x, n) / static_cast<float>(n);
  const float inverse = 1.0f / __builtin_sqrtf(mean + eps);
  for (std::int64_t i = 0; i < n; ++i) put(weight[i] * (x[i] * inverse), out + i);
}

void add(const float* __restrict y, std::int64_t n, float* __restrict x) {
  for (std::int64_t i = 0; i < n; ++i) x[i] += y[i];
}

void f32_to_quant(const float* x, std::int64_t n, QuantBlock* out) {
  for (std::int64_t i = 0; i < n; i += 32) quantize(x + i, out + i / 16);
}

void rms_norm_quant(const float* x, const float* weight, std::int64_t n, float eps,
                    QuantBlock* out) {
  const float mean = sum_of_squares(x, n) / static_cast<float>(n);
  const float inverse = 1.0f / __builtin_sqrtf(mean + eps);
  float group[32];
  for (std::int64_t i = 0; i < n; i += 32) {
    for (int j = 0; j < 32; ++j) group[j] = weight[i + j] * (x[i + j] * inverse);
    quantize(group, out + i / 16);
  }
}

void rope(const float* __restrict cos, const float* __restrict sin, std::int64_t half, float* x) {
  float* __restrict low = x;
  float* __restrict high = x + half;
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = low[i], b = high[i];
    low[i] = a * cos[i] - b * sin[i];
    high[i] = b * cos[i] + a * sin[i];
  }
}

void f32_to_bf16(const float* __restrict x, std::int64_t n, std::uint16_t* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = to_bf16(x[i]);
}

void bf16_to_f32(const std::uint16_t* __restrict x, std::int64_t n, float* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) {
    out[i] = std::bit_cast<float>(static_cast<std::uint32_t>(x[i]) << 16);
  }
}

void f32_to_f16(const float* __restrict x, std::int64_t n, std::uint16_t* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = to_f16(x[i]);
}

void f16_to_f32(const std::uint16_t* __restrict x, std::int64_t n, float* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = from_f16(x[i]);
}

// act(gate) * up of the first `count` lanes.
template <typename Act>
inline FloatVec activated(const float* gate, const float* up, std::int64_t count) {
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(float);
  FloatVec g = {}, u = {};
  std::memcpy(&g, gate, bytes);
  std::memcpy(&u, up, bytes);
  return Act::of(g) * u;
}

template <typename Act>
void activate_f32(const float* gate, const float* up, std::int64_t n, float* out) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const FloatVec values = activated<Act>(gate + i, up + i, kLanes);
    std::memcpy(out + i, &values, sizeof(values));
  }
  if (i == n) return;
  const FloatVec values = activated<Act>(gate + i, up + i, n - i);
  std::memcpy(out + i, &values, static_cast<std::size_t>(n - i) * sizeof(float));
}

// Some hundred elements at a time: the activation and the rounding of a block are a long chain
// each, of which the processor has several under way if they are not one behind the other.
constexpr std::int64_t kSomeElements = 256;

template <typename Act>
void activate_bf16(const float* gate, const float* up, std::int64_t n, std::uint16_t* out) {
  float values[kSomeElements];
  for (std::int64_t i = 0; i < n; i += kSomeElements) {
    const std::int64_t count = n - i < kSomeElements ? n - i : kSomeElements;
    activate_f32<Act>(gate + i, up + i, count, values);
    f32_to_bf16(values, count, out + i);
  }
}

template <typename Act>
void activate_quant(const float* gate, const float* up, std::int64_t n, QuantBlock* out) {
  float values[kSomeElements];
  for (std::int64_t i = 0; i < n; i += kSomeElements) {
    const std::int64_t count = n - i < kSomeElements ? n - i : kSomeElements;
    activate_f32<Act>(gate + i, up + i, count, values);
    f32_to_quant(values, count, out + i / 16);
  }
}

inline std::uint8_t to_e4m3(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  // Below 2^-6 the sum with 2^14 leaves the multiple of 2^-9, rounded, in the mantissa.
  const float small = std::bit_cast<float>(magnitude) + 0x1p14f;
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(small) - std::bit_cast<std::uint32_t>(0x1p14f);
  const std::uint32_t normal =
      (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  std::uint32_t code = magnitude < std::bit_cast<std::uint32_t>(0x1p-6f) ? subnormal : normal;
  code = magnitude >= std::bit_cast<std::uint32_t>(448.0f) ? 0x7eu : code;
  code = magnitude > 0x7f800000u ? 0x7fu : code;
  return static_cast<std::uint8_t>(sign | code);
}

void f32_to_e4m3(const float* __restrict x, std::int64_t n, float scale,
                 std::uint8_t* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = to_e4m3(x[i] / scale);
}

void f32_to_int8(const float* __restrict x, std::int64_t n, std::int8_t* __restrict out) {
  const Scale8 scale = scale_of(x, n);
  const float inverse = scale.inverse;
  const bool is_finite = scale.is_finite;
  for (std::int64_t i = 0; i < n; ++i) {
    const float shifted = (is_finite ? x[i] : 0.0f) * inverse + kMagic;
    out[i] = static_cast<std::int8_t>(std::bit_cast<std::int32_t>(shifted) -
                                      std::bit_cast<std::int32_t>(kMagic));
  }
  const float stored = is_finite ? scale.scale : __builtin_nanf("");
  std::memcpy(out + n, &stored, sizeof(stored));
}

void round_to_e4m3(std::int64_t n, std::uint16_t* x) {
  std::uint16_t largest = 0;  // magnitudes are in the order of their bits
  for (std::int64_t i = 0; i < n; ++i) {
    const auto magnitude = static_cast<std::uint16_t>(x[i] & 0x7fffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  const float scale = e4m3_scale(std::bit_cast<float>(std::uint32_t{largest} << 16));
  for (std::int64_t i = 0; i < n; ++i) {
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(x[i]) << 16);
    // The number has four bits: the lower half of the float is 0.
    const float number = e4m3_nearest(value / scale);
    x[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(number) >> 16);
  }
  std::memcpy(x + n, &scale, sizeof(scale));
}

constexpr RowOps make_row_ops() {
  RowOps ops{};
  ops.rms_norm_f32 = &rms_norm<float>;
  ops.rms_norm_bf16 = &rms_norm<std::uint16_t>;
  ops.rms_norm_quant = &rms_norm_quant;
  ops.add = &add;
  ops.silu_mul_f32 = &activate_f32<Silu>;
  ops.silu_mul_bf16 = &activate_bf16<Silu>;
  ops.gelu_mul_f32 = &activate_f32<GeluTanh>;
  ops.gelu_mul_bf16 = &activate_bf16<GeluTanh>;
  ops.silu_mul_quant = &activate_quant<Silu>;
  ops.gelu_mul_quant = &activate_quant<GeluTanh>;
  ops.rope = &rope;
  ops.round_to_e4m3 = &round_to_e4m3;
  ops.f32_to_bf16 = &f32_to_bf16;
  ops.bf16_to_f32 = &bf16_to_f32;
  ops.f32_to_f16 = &f32_to_f16;
  ops.f16_to_f32 = &f16_to_f32;
  ops.f32_to_e4m3 = &f32_to_e4m3;
  ops.f32_to_int8 = &f32_to_int8;
  ops.f32_to_quant = &f32_to_quant;
  return ops;
}

}  // namespace
}  // namespace specdec::cpu
