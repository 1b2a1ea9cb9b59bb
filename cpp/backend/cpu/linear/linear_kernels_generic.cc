#include "backend/cpu/linear/linear_kernels.h"

namespace specdec::cpu {

const LinearKernels& linear_kernels(CpuIsa) { return linear_kernels_plain(); }

}  // namespace specdec::cpu
