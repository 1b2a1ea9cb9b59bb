// The operations of AVX-512 for attention_impl.h. Included by per-ISA files only.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "backend/cpu/attention/attention_math.h"

namespace specdec::cpu {
namespace {

struct Avx512 {
  static constexpr int W = 16;
  typedef float F __attribute__((vector_size(64)));
  typedef std::int32_t I __attribute__((vector_size(64)));
  static constexpr int kScoreRows = 8, kValueRows = 6, kValueVectors = 4;

  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F widen_f16(const std::uint16_t* x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  static F widen_bf16(const std::uint16_t* x) {
    const __m512i wide =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  // 16 codes as float16 bits: the sign to the top, the rest three places below it; NaN is its own.
  static __m256i e4m3_to_f16(__m128i codes) {
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    const __m256i bits = _mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xbfff)));
    const __m256i top = _mm256_set1_epi16(0x3f80);
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(bits, top), top);
    return _mm256_mask_mov_epi16(bits, nan, _mm256_set1_epi16(0x7e00));
  }
  static F widen_e4m3(const std::uint8_t* x) {
    return _mm512_cvtph_ps(e4m3_to_f16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
  }
  static F widen_int8(const std::int8_t* x) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
  }
  // out[i] = 32-bit word i of the W rows' next four: rows j, j + 4, j + 8, j + 12 share a register
  // (masked broadcasts from memory need no shuffle unit), then 4 x 4 transposes in the 128-bit
  // lanes. word(j): where those of row j are.
  template <typename Word>
  static void transpose(Word&& word, __m512* out) {
    __m512 a[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      a[j] = _mm512_castps128_ps512(_mm_loadu_ps(word(j)));
      a[j] = _mm512_mask_broadcast_f32x4(a[j], 0x00f0, _mm_loadu_ps(word(j + 4)));
      a[j] = _mm512_mask_broadcast_f32x4(a[j], 0x0f00, _mm_loadu_ps(word(j + 8)));
      a[j] = _mm512_mask_broadcast_f32x4(a[j], 0xf000, _mm_loadu_ps(word(j + 12)));
    }
    const __m512 b0 = _mm512_unpacklo_ps(a[0], a[1]), b1 = _mm512_unpackhi_ps(a[0], a[1]);
    const __m512 b2 = _mm512_unpacklo_ps(a[2], a[3]), b3 = _mm512_unpackhi_ps(a[2], a[3]);
    out[0] = _mm512_shuffle_ps(b0, b2, 0x44);
    out[1] = _mm512_shuffle_ps(b0, b2, 0xee);
    out[2] = _mm512_shuffle_ps(b1, b3, 0x44);
    out[3] = _mm512_shuffle_ps(b1, b3, 0xee);
  }
  // out[i] = head dim d + i of the W rows: four of them.
  static void load_transposed(const float* const* rows, int d, F* out) {
    __m512 lanes[4];
    transpose([&](int j) { return rows[j] + d; }, lanes);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) out[i] = lanes[i];
  }
  // The same for eight of rows in bf16.
  static void load_transposed_bf16(const Bf16* const* rows, int d, F* out) {
    __m512 pairs[4];
    transpose([&](int j) { return reinterpret_cast<const float*>(rows[j] + d); }, pairs);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i pair = _mm512_castps_si512(pairs[i]);
      out[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
      out[2 * i + 1] = _mm512_castsi512_ps(
          _mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }
  }
  // The last 8 head dims of an odd multiple of 8; the upper lanes are zero.
  static F load_half(const float* x) { return _mm512_zextps256_ps512(_mm256_loadu_ps(x)); }
  static F load_half(const Bf16* x) {
    const __m256i wide =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    return _mm512_zextps256_ps512(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
  }
  static F load_half(const F16* x) {
    return _mm512_zextps256_ps512(
        _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
  }
  static F load_half(const E4m3* x) {  // the upper codes are 0
    return _mm512_cvtph_ps(e4m3_to_f16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
  }
  static F load_half(const Int8* x) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
  }
};

}  // namespace
}  // namespace specdec::cpu
