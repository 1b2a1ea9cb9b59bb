#include <immintrin.h>

#include "backend/cpu/linear/linear_tile.h"

namespace specdec::cpu {
namespace {

struct Avx2 {
  using Vec = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kAccumulators = 12;  // of 16 registers
  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec load_y(const float* p) { return _mm256_loadu_ps(p); }
  static void store_y(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  // always_inline: GCC takes a function that only prefetches for one without effect and drops its
  // calls unless they are inlined at once.
  __attribute__((always_inline)) static void prefetch(const std::byte* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
  }
};

struct Avx2F32 : Avx2 {
  using Weights = __m256;
  using Input = __m256;
  static constexpr int kStepBytes = 128;
  static Weights load(const std::byte* p) {
    return _mm256_load_ps(reinterpret_cast<const float*>(p));
  }
  static Input broadcast(const std::byte* p) {
    return _mm256_broadcast_ss(reinterpret_cast<const float*>(p));
  }
  static Vec mac(Vec acc, Weights w, Input x) { return _mm256_fmadd_ps(w, x, acc); }
};

struct Avx2F16 : Avx2F32 {
  static constexpr int kStepBytes = 64;
  static Weights load(const std::byte* p) {
    return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  }
};

// bf16 is the upper half of a float: a pair splits into two floats with a shift and a mask.
struct Avx2Bf16 : Avx2 {
  struct Pair {
    __m256 low, high;
  };
  using Weights = Pair;
  using Input = Pair;
  static constexpr int kStepBytes = 128;
  static constexpr int kAccumulators = 8;
  static Pair split(__m256i pairs) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)))};
  }
  static Weights load(const std::byte* p) {
    return split(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Input broadcast(const std::byte* p) {
    return split(_mm256_set1_epi32(*reinterpret_cast<const std::int32_t*>(p)));
  }
  static Vec mac(Vec acc, Weights w, Input x) {
    return _mm256_fmadd_ps(w.high, x.high, _mm256_fmadd_ps(w.low, x.low, acc));
  }
};

}  // namespace

const LinearKernels& linear_kernels_avx2() {
  static constexpr LinearKernels kernels = make_linear_kernels<Avx2F32, Avx2F16, Avx2Bf16, 6>();
  return kernels;
}

}  // namespace specdec::cpu
