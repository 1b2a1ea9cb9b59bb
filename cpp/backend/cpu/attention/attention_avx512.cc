#include "backend/cpu/attention/attention_impl.h"
#include "backend/cpu/attention/attention_ops_avx512.h"

namespace specdec::cpu {

const AttentionKernels& attention_kernels_avx512() {
  static constexpr AttentionKernels kernels = make_kernels<Avx512>();
  return kernels;
}

}  // namespace specdec::cpu
