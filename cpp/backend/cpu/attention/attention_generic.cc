#include "backend/cpu/attention/attention_kernels.h"

namespace specdec::cpu {

const AttentionKernels& attention_kernels() { return attention_kernels_plain(); }

const AttentionKernels& fast_attention_kernels() { return attention_kernels(); }

}  // namespace specdec::cpu
