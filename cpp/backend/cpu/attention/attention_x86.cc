#include "backend/cpu/attention/attention_kernels.h"
#include "base/cpu_features.h"

namespace specdec::cpu {

const AttentionKernels& attention_kernels() {
  switch (cpu_isa()) {
    case CpuIsa::kPlain:
      return attention_kernels_plain();
    case CpuIsa::kAvx2:
      return attention_kernels_avx2();
    case CpuIsa::kAvx512:
    case CpuIsa::kAmx:
    case CpuIsa::kAvx512Bf16:  // see fast_attention_kernels() for products in bf16
      return attention_kernels_avx512();
  }
  return attention_kernels_plain();
}

const AttentionKernels& fast_attention_kernels() {
  switch (cpu_isa()) {
    case CpuIsa::kAmx:
      return attention_kernels_amx();
    case CpuIsa::kAvx512Bf16:
      return attention_kernels_avx512_bf16();
    default:
      return attention_kernels();
  }
}

}  // namespace specdec::cpu
