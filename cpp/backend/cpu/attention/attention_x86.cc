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
    case CpuIsa::kAvx512Bf16:  // a product in bf16 would round differently from the fp32 cache
      return attention_kernels_avx512();
  }
  return attention_kernels_plain();
}

const AttentionKernels& fast_attention_kernels() {
  return cpu_isa() == CpuIsa::kAmx ? attention_kernels_amx() : attention_kernels();
}

}  // namespace specdec::cpu
