// 512-bit operations shared by the two AVX-512 files. Anonymous namespace on purpose: see
// linear_tile.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace specdec::cpu {
namespace {

struct Avx512 {
  using Vec = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kAccumulators = 24;  // of 32 registers; the rest hold weights and inputs
  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec load_y(const float* p) { return _mm512_loadu_ps(p); }
  static void store_y(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  // always_inline: GCC takes a function that only prefetches for one without effect and drops its
  // calls unless they are inlined at once.
  __attribute__((always_inline)) static void prefetch(const std::byte* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
  }
};

struct Avx512F32 : Avx512 {
  using Weights = __m512;
  using Input = __m512;
  static constexpr int kStepBytes = 128;
  static Weights load(const std::byte* p) { return _mm512_load_ps(p); }
  static Input broadcast(const std::byte* p) {
    return _mm512_set1_ps(*reinterpret_cast<const float*>(p));
  }
  static Vec mac(Vec acc, Weights w, Input x) { return _mm512_fmadd_ps(w, x, acc); }
};

struct Avx512F16 : Avx512F32 {
  static constexpr int kStepBytes = 64;
  static Weights load(const std::byte* p) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
  }
};

// bf16 is the upper half of a float: a pair splits into two floats with a shift and a mask.
struct Avx512Bf16Split : Avx512 {
  struct Pair {
    __m512 low, high;
  };
  using Weights = Pair;
  using Input = Pair;
  static constexpr int kStepBytes = 128;
  static constexpr int kAccumulators = 22;
  static Pair split(__m512i pairs) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)))};
  }
  static Weights load(const std::byte* p) { return split(_mm512_load_si512(p)); }
  static Input broadcast(const std::byte* p) {
    return split(_mm512_set1_epi32(*reinterpret_cast<const std::int32_t*>(p)));
  }
  static Vec mac(Vec acc, Weights w, Input x) {
    return _mm512_fmadd_ps(w.high, x.high, _mm512_fmadd_ps(w.low, x.low, acc));
  }
};

}  // namespace
}  // namespace specdec::cpu
