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

}  // namespace

const LinearKernels& linear_kernels_avx512_bf16() {
  static constexpr LinearKernels kernels =
      make_linear_kernels<Avx512F32, Avx512F16, Avx512Bf16, 12>();
  return kernels;
}

}  // namespace specdec::cpu
