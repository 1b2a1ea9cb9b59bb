// For compilers without tiles: no process has CpuIsa::kAmx then.
#include "backend/cpu/linear/linear_kernels.h"

namespace specdec::cpu {

const LinearKernels& linear_kernels_amx() { return linear_kernels_avx512_bf16(); }

}  // namespace specdec::cpu
