#include "backend/cpu/linear/linear_kernels.h"
#include "backend/cpu/linear/quant_kernels.h"

namespace specdec::cpu {

const LinearKernels& linear_kernels(CpuIsa) { return linear_kernels_plain(); }

const QuantKernels& quant_kernels(CpuIsa) { return quant_kernels_plain(); }

}  // namespace specdec::cpu
