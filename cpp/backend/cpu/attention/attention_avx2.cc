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
