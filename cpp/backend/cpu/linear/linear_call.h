// A linear layer on rows of any of the three dtypes.
#pragma once

#include <cstdint>

#include "backend/cpu/linear/packed_linear.h"
#include "base/tensor_view.h"

namespace specdec::cpu {

// out[R, N] = x[R, K] W^T + b in any mix of dtypes, inner dimensions contiguous. The linear itself
// sees its own input dtype and float32 out; where the caller's tensors are not that, rows go
// through scratch of the calling thread. Runs on ThreadPool::global(). `fast`: rows go in
// fast_form().
void run_linear(const PackedLinear& linear, const TensorView& x, const TensorView& out,
                bool fast = false);

// float32 rows [rows, columns], contiguous, as run_linear takes them.
inline TensorView rows_view(const float* data, std::int64_t rows, std::int64_t columns) {
  TensorView view;
  view.data = const_cast<float*>(data);
  view.ndim = 2;
  view.shape = {rows, columns};
  view.strides = {columns, 1};
  return view;
}

}  // namespace specdec::cpu
