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

namespace {

// Where a dot product takes four cycles, eight chains keep both ports busy. Four rows have as many,
// their sums of y stay in registers, and their second blocks cost less than half: prompts in 4 bits
// take 0.92 of the time on a Zen 5, and tiles of 24 rows a little less than those of 15. Where it
// takes five cycles there must be ten chains.
QuantKernels for_this_processor(QuantKernels kernels) {
  if (__builtin_cpu_is("amd")) {
    kernels.prefill_pass_rows = 4;
    kernels.prefill_rows = 24;
  }
  return kernels;
}

}  // namespace

const QuantKernels& quant_kernels(CpuIsa isa) {
  __builtin_cpu_init();
  if (isa >= CpuIsa::kAvx512 && __builtin_cpu_supports("avx512vnni")) {
    static const QuantKernels kernels = for_this_processor(quant_kernels_avx512_vnni());
    return kernels;
  }
  if (isa >= CpuIsa::kAvx2) {
    return __builtin_cpu_supports("avxvnni") ? quant_kernels_avx_vnni() : quant_kernels_avx2();
  }
  return quant_kernels_plain();
}

}  // namespace specdec::cpu
