#include "backend/cpu/linear/linear_kernels.h"
#include "backend/cpu/linear/quant_kernels.h"

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
    case CpuIsa::kAmx:
      return linear_kernels_amx();
  }
  return linear_kernels_plain();
}

const QuantKernels& quant_kernels(CpuIsa isa) {
  __builtin_cpu_init();
  if (isa >= CpuIsa::kAvx512 && __builtin_cpu_supports("avx512vnni")) {
    return quant_kernels_avx512_vnni();
  }
  if (isa >= CpuIsa::kAvx2) {
    return __builtin_cpu_supports("avxvnni") ? quant_kernels_avx_vnni() : quant_kernels_avx2();
  }
  return quant_kernels_plain();
}

}  // namespace specdec::cpu
