// 256-bit operations shared by the AVX2 and the AVX-VNNI file. Anonymous namespace on purpose: see
// quant_tile.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace specdec::cpu {
namespace {

struct Avx2Ops {
  using Ints = __m256i;
  using Floats = __m256;
  static constexpr int kLanes = 8;
  static Ints load_codes(const std::byte* p) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  }
  static Ints low(Ints v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  static Ints high(Ints v) {
    return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
  }
  static Ints splat(const void* p) {
    std::int32_t value;
    std::memcpy(&value, p, sizeof(value));
    return _mm256_set1_epi32(value);
  }
  static Ints zero_ints() { return _mm256_setzero_si256(); }
  static Floats zero_floats() { return _mm256_setzero_ps(); }
  template <int n>
  static Ints shift_left(Ints v) {
    return _mm256_slli_epi32(v, n);
  }
  static Ints sub(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
  static Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
  static Floats load(const float* p) { return _mm256_loadu_ps(p); }
  static Floats load_half(const std::byte* p) {
    return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Floats splat_float(const float* p) { return _mm256_broadcast_ss(p); }
  static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
  // always_inline: GCC takes a function that only prefetches for one without effect and drops its
  // calls unless they are inlined at once.
  __attribute__((always_inline)) static void prefetch(const std::byte* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
  }
};

}  // namespace
}  // namespace specdec::cpu
