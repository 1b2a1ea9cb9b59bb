// For compilers without tiles: no process has CpuIsa::kAmx then.
#include "backend/cpu/attention/attention_kernels.h"

namespace specdec::cpu {

const AttentionKernels& attention_kernels_amx() { return attention_kernels_avx512_bf16(); }

}  // namespace specdec::cpu
