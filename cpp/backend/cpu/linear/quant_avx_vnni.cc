#include "backend/cpu/linear/quant_ops_avx2.h"
#include "backend/cpu/linear/quant_tile.h"

namespace specdec::cpu {
namespace {

struct AvxVnni : Avx2Ops {
  static Ints dot(Ints sum, Ints codes, Ints x) { return _mm256_dpbusd_avx_epi32(sum, codes, x); }
};

}  // namespace

const QuantKernels& quant_kernels_avx_vnni() {
  static constexpr QuantKernels kernels = make_quant_kernels<AvxVnni>();
  return kernels;
}

}  // namespace specdec::cpu
