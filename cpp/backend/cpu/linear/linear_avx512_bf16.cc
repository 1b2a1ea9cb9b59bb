#include "backend/cpu/linear/linear_ops_avx512_bf16.h"

namespace specdec::cpu {

const LinearKernels& linear_kernels_avx512_bf16() {
  static constexpr LinearKernels kernels = make_avx512_bf16_kernels();
  return kernels;
}

}  // namespace specdec::cpu
