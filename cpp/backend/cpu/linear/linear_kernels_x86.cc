#include "backend/cpu/linear/linear_kernels.h"

namespace specdec::cpu {

const LinearKernels& linear_kernels(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPlain:
      return linear_kernels_plain();
    case CpuIsa::kAvx2:
      return linear_kernels_avx2();
    case CpuIsa::kAvx512:
      return linear_kernels_avx512();
    case CpuIsa::kAvx512Bf16:
      return linear_kernels_avx512_bf16();
  }
  return linear_kernels_plain();
}

}  // namespace specdec::cpu
