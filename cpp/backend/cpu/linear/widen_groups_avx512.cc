// Groups of quantised weights as steps of bf16, for processors with tiles (linear_amx.cc).
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "backend/cpu/linear/linear_kernels.h"
#include "backend/cpu/linear/weight_type.h"

namespace specdec::cpu {
namespace {

constexpr int kLanes = 16;           // columns of a vector
constexpr int kWideStepBytes = 128;  // two k of 32 columns in bf16
constexpr int kQuadBytes = 128;      // four k of 32 columns, or eight in nibbles

// Scale and offset of 16 columns: element = u * scale + offset. Where there is a minimum the
// product is exact (but for q4_g), so fused or not the sum has the bits of group_values().
struct Line {
  __m512 scale, offset;
};

inline __attribute__((always_inline)) __m512 load_scales(const QuantFormat& format,
                                                         const std::byte* step, int set,
                                                         int column) {
  const std::byte* scales = step + format.codes_bytes();
  const int index = set * 32 + column;
  if (format.wide_scales) return _mm512_loadu_ps(scales + 4 * index);
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + 2 * index)));
}

inline __attribute__((always_inline)) Line load_line(const QuantFormat& format,
                                                     const std::byte* step, int set, int column) {
  const __m512 scale = load_scales(format, step, set, column);
  if (format.has_min) return {scale, load_scales(format, step, format.two_scales ? 2 : 1, column)};
  // zero is a power of two, so this is exact.
  return {scale, _mm512_mul_ps(scale, _mm512_set1_ps(static_cast<float>(-format.zero())))};
}

// The group's elements (group_values), rounded to bf16.
template <WeightType kType>
inline __attribute__((always_inline)) void widen_group(const std::byte* step, std::byte* out) {
  constexpr QuantFormat kFormat = quant_format(kType);
  // Lower half and upper half of a register, in turns.
  alignas(64) static constexpr auto kInTurns = [] {
    struct {
      std::uint8_t at[64];
    } bytes{};
    for (int i = 0; i < 64; ++i) {
      bytes.at[i] = static_cast<std::uint8_t>(i / 4 * 2 + i % 2 + (i / 2 % 2) * 32);
    }
    return bytes;
  }();
  const __m512i in_turns = _mm512_load_si512(&kInTurns);
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 2
  for (int column = 0; column < 2 * kLanes; column += kLanes) {
    const Line first = load_line(kFormat, step, 0, column);
    const Line last = kFormat.two_scales ? load_line(kFormat, step, 1, column) : first;
    const auto value = [&](__m512 u, const Line& line) __attribute__((always_inline)) {
      if constexpr (kType == WeightType::kQ4G) {  // a scale of 24 bits: the product is rounded
        return _mm512_add_ps(_mm512_mul_ps(u, line.scale), line.offset);
      } else {
        return _mm512_fmadd_ps(u, line.scale, line.offset);
      }
    };
    const auto store = [&](int pair, __m512 even, __m512 odd) __attribute__((always_inline)) {
      const auto halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
      _mm512_store_si512(out + pair * kWideStepBytes + column * 4,
                         _mm512_permutexvar_epi8(in_turns, halves));
    };
    if constexpr (kFormat.nibbles) {
#pragma GCC unroll 4
      for (int quad = 0; quad < 4; ++quad) {
        const __m512i codes = _mm512_load_si512(step + quad * kQuadBytes + column * 4);
        // permutexvar looks at four bits alone.
        const auto at = [&](int bit) __attribute__((always_inline)) {
          return value(_mm512_permutexvar_ps(_mm512_srli_epi32(codes, bit), numbers), first);
        };
        store(2 * quad, at(0), at(8));
        store(2 * quad + 1, at(16), at(24));
        store(8 + 2 * quad, at(4), at(12));
        store(8 + 2 * quad + 1, at(20), at(28));
      }
    } else {
      const __m512i byte = _mm512_set1_epi32(255);
#pragma GCC unroll 8
      for (int quad = 0; quad < 8; ++quad) {
        const __m512i codes = _mm512_load_si512(step + quad * kQuadBytes + column * 4);
        const Line& line = quad < 4 ? first : last;
        const auto at = [&](int bit) __attribute__((always_inline)) {
          __m512i u = bit == 0 ? codes : _mm512_srli_epi32(codes, bit);
          if (bit < 24) u = _mm512_and_si512(u, byte);
          return value(_mm512_cvtepi32_ps(u), line);
        };
        store(2 * quad, at(0), at(8));
        store(2 * quad + 1, at(16), at(24));
      }
    }
  }
}

template <WeightType kType>
void widen_groups(const std::byte* step, std::int64_t groups, std::uint16_t* out,
                  const std::byte* prefetch) {
  constexpr std::int64_t kStepBytes = quant_format(kType).step_bytes();
  auto* to = reinterpret_cast<std::byte*>(out);
  for (std::int64_t i = 0; i < groups; ++i) {
#pragma GCC unroll 24
    for (std::int64_t line = 0; line < kStepBytes; line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(prefetch + line), _MM_HINT_T1);
    }
    widen_group<kType>(step, to);
    step += kStepBytes;
    prefetch += kStepBytes;
    to += kWideGroup * sizeof(std::uint16_t);
  }
}

}  // namespace

WidenGroupsFn widen_groups_avx512(WeightType type) {
  switch (type) {
    case WeightType::kQ8_0:
    case WeightType::kQ5_0:
      return &widen_groups<WeightType::kQ8_0>;
    case WeightType::kQ4_0:
      return &widen_groups<WeightType::kQ4_0>;
    case WeightType::kQ4_1:
      return &widen_groups<WeightType::kQ4_1>;
    case WeightType::kQ4K:
      return &widen_groups<WeightType::kQ4K>;
    case WeightType::kQ5K:
    case WeightType::kQ5_1:
      return &widen_groups<WeightType::kQ5K>;
    case WeightType::kQ6K:
      return &widen_groups<WeightType::kQ6K>;
    case WeightType::kQ4G:
      return &widen_groups<WeightType::kQ4G>;
    case WeightType::kQ8G:
      return &widen_groups<WeightType::kQ8G>;
    default:
      return nullptr;
  }
}

}  // namespace specdec::cpu
