#include <immintrin.h>

#include "backend/cpu/attention/attention_impl.h"

namespace specdec::cpu {
namespace {

struct Avx2 {
  static constexpr int W = 8;
  typedef float F __attribute__((vector_size(32)));
  typedef std::int32_t I __attribute__((vector_size(32)));
  static constexpr int kScoreRows = 4, kValueRows = 4, kValueVectors = 2;

  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F widen_f16(const std::uint16_t* x) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  static F widen_bf16(const std::uint16_t* x) {
    const __m256i wide =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  // As float16 bits: the sign to the top, the rest three places below it; NaN is its own.
  static F widen_e4m3(const std::uint8_t* x) {
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
    const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7);
    const __m128i bits = _mm_and_si128(wide, _mm_set1_epi16(static_cast<short>(0xbfff)));
    const __m128i top = _mm_set1_epi16(0x3f80);
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(bits, top), top);
    return _mm256_cvtph_ps(_mm_or_si128(bits, _mm_and_si128(nan, _mm_set1_epi16(0x7e00))));
  }
  static F widen_int8(const std::int8_t* x) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
  }
  // out[i] = head dim d + i of the W rows: rows j and j + 4 share a register, then 4 x 4 transposes
  // in the 128-bit lanes.
  static void load_transposed(const float* const* rows, int d, F* out) {
    __m256 a[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      a[j] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[j] + d)),
                                  _mm_loadu_ps(rows[j + 4] + d), 1);
    }
    const __m256 b0 = _mm256_unpacklo_ps(a[0], a[1]), b1 = _mm256_unpackhi_ps(a[0], a[1]);
    const __m256 b2 = _mm256_unpacklo_ps(a[2], a[3]), b3 = _mm256_unpackhi_ps(a[2], a[3]);
    out[0] = _mm256_shuffle_ps(b0, b2, 0x44);
    out[1] = _mm256_shuffle_ps(b0, b2, 0xee);
    out[2] = _mm256_shuffle_ps(b1, b3, 0x44);
    out[3] = _mm256_shuffle_ps(b1, b3, 0xee);
  }
  template <typename T>
  static F load_half(const T*) {
    return F{};  // head dims are multiples of 8: a half vector never occurs
  }
};

}  // namespace

const AttentionKernels& attention_kernels_avx2() {
  static constexpr AttentionKernels kernels = make_kernels<Avx2>();
  return kernels;
}

}  // namespace specdec::cpu
