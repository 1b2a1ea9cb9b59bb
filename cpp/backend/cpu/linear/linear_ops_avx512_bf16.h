// The operations of AVX-512 with bfloat16 products for linear_tile.h. Included by per-ISA files
// only.
#pragma once

#include "backend/cpu/linear/linear_ops_avx512.h"
#include "backend/cpu/linear/linear_tile.h"

namespace specdec::cpu {
namespace {

struct Avx512Bf16 : Avx512 {
  using Weights = __m512bh;
  using Input = __m512bh;
  static constexpr int kStepBytes = 128;
  static Weights load(const std::byte* p) {
    return reinterpret_cast<__m512bh>(_mm512_load_si512(p));
  }
  static Input broadcast(const std::byte* p) {
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(*reinterpret_cast<const std::int32_t*>(p)));
  }
  static Vec mac(Vec acc, Weights w, Input x) { return _mm512_dpbf16_ps(acc, w, x); }
};

// The two bytes of the bf16 number that each magnitude of e4m3 is; what is NaN does not occur.
struct WideBytes {
  alignas(64) std::uint8_t low[128], high[128];
};
constexpr WideBytes wide_bytes() {
  WideBytes bytes{};
  for (int magnitude = 0; magnitude < 128; ++magnitude) {
    int exponent = magnitude >> 3, mantissa = magnitude & 7;
    if (exponent == 0) {  // mantissa * 2^-9: shifted until its leading bit is the implied one
      exponent = 1;
      while (mantissa != 0 && mantissa < 8) mantissa *= 2, --exponent;
    }
    const int bits =
        mantissa == 0 && magnitude == 0 ? 0 : (exponent + 120) << 7 | (mantissa & 7) << 4;
    bytes.low[magnitude] = static_cast<std::uint8_t>(bits & 0xff);
    bytes.high[magnitude] = static_cast<std::uint8_t>(bits >> 8);
  }
  return bytes;
}
constexpr WideBytes kWide = wide_bytes();

struct Avx512E4m3 : Avx512Bf16 {
  static constexpr int kStepBytes = 64;
  static void load_step(const std::byte* p, Weights* weights) {
    const __m512i codes = _mm512_load_si512(p);
    const auto look_up = [&](const std::uint8_t* table) {
      return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes,
                                      _mm512_load_si512(table + 64));
    };
    const __m512i low = look_up(kWide.low);
    // high | (codes & 0x80)
    const __m512i high =
        _mm512_ternarylogic_epi32(look_up(kWide.high), codes, _mm512_set1_epi8(-0x80), 0xf8);
    weights[0] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi8(low, high));
    weights[1] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi8(low, high));
  }
};

constexpr LinearKernels make_avx512_bf16_kernels() {
  LinearKernels kernels =
      make_linear_kernels<Avx512F32, Avx512F16, Avx512Bf16, 12>(/*widen=*/nullptr);
  fill_tiles<Avx512E4m3, 12>(kernels.e4m3);
  return kernels;
}

}  // namespace
}  // namespace specdec::cpu
