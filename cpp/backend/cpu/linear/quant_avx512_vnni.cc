#include <immintrin.h>

#include <cstring>

#include "backend/cpu/linear/quant_tile.h"

namespace specdec::cpu {
namespace {

struct Avx512Vnni {
  using Ints = __m512i;
  using Floats = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kVecs = 2;
  static constexpr int kBlockRows = 12;  // 24 of 32 registers hold sums
  static constexpr int kRegisterRows = 4;
  static Ints load_codes(const std::byte* p) { return _mm512_load_si512(p); }
  static Ints low(Ints v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static Ints high(Ints v) {
    return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
  }
  // In place and in the order of the program. Left to choose, the compiler copies sums from
  // register to register, and moves what is fetched between products to the front.
  static void add_dot(Ints& sum, Ints codes, Ints x) {
    asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
  }
  static Ints splat(const void* p) {
    std::int32_t value;
    std::memcpy(&value, p, sizeof(value));
    return _mm512_set1_epi32(value);
  }
  static Ints zero_ints() { return _mm512_setzero_si512(); }
  static Floats zero_floats() { return _mm512_setzero_ps(); }
  template <int n>
  static Ints shift_left(Ints v) {
    return _mm512_slli_epi32(v, n);
  }
  static Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
  static Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
  static Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static Floats load_half(const std::byte* p) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Floats splat_float(const float* p) { return _mm512_set1_ps(*p); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
  // always_inline: see quant_ops_avx2.h.
  __attribute__((always_inline)) static void prefetch(const std::byte* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
  }
};

}  // namespace

const QuantKernels& quant_kernels_avx512_vnni() {
  static constexpr QuantKernels kernels = make_quant_kernels<Avx512Vnni>();
  return kernels;
}

}  // namespace specdec::cpu
