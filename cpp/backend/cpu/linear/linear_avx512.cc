#include "backend/cpu/linear/linear_ops_avx512.h"
#include "backend/cpu/linear/linear_tile.h"

namespace specdec::cpu {

const LinearKernels& linear_kernels_avx512() {
  static constexpr LinearKernels kernels =
      make_linear_kernels<Avx512F32, Avx512F16, Avx512Bf16Split, 12>();
  return kernels;
}

}  // namespace specdec::cpu
