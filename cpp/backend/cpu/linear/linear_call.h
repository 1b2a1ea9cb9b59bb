// A linear layer on rows of any of the three dtypes.
#pragma once

#include "backend/cpu/linear/packed_linear.h"
#include "base/tensor_view.h"

namespace specdec::cpu {

// out[R, N] = x[R, K] W^T + b in any mix of dtypes, inner dimensions contiguous. The linear itself
// sees its own input dtype and float32 out; where the caller's tensors are not that, rows go
// through scratch of the calling thread. Runs on ThreadPool::global().
void run_linear(const PackedLinear& linear, const TensorView& x, const TensorView& out);

}  // namespace specdec::cpu
