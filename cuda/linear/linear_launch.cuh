// What the matrix kernels of the linear layer share: a launch, and where its sums go.
#pragma once

#include <cstdint>

#include "backend/linear_op.h"
#include "gpu/gpu.cuh"
#include "kv/elements.cuh"
#include "linear/sums.cuh"

namespace specdec::cuda {

// What a launch adds to the call.
struct LinearLaunch {
  LinearParams call;
  std::int32_t part_depth, parts_per_unit,
      row_tiles;             // of hopper_linear.cuh: a slice's, 1, its tiles
  float* partial;            // [units, rows, pitch]; null: one unit, which writes out
  std::int64_t pitch;        // of partial, floats
  std::int64_t unit_stride;  // of partial, floats
  bool aligned_out;          // may 8 columns of out be stored at once?
};

// 8 columns of a row, from its sums: with the bias into out, or as they are into `partial`.
template <class T>
__device__ __forceinline__ void store_sums(const LinearLaunch& launch, std::int32_t unit,
                                           std::int32_t row, std::int32_t column,
                                           float (&sums)[kLaneElements]) {
  const LinearParams& call = launch.call;
  if (launch.partial != nullptr) {
    float* to = launch.partial + unit * launch.unit_stride + row * launch.pitch + column;
    store_floats(sums, to, true);
    return;
  }
  complete_sums<T>(call.row_scales, call.bias, row, column, call.columns, sums);
  T* out = static_cast<T*>(call.out) + row * call.out_row_stride + column;
  const bool whole = launch.aligned_out && column + kLaneElements <= call.columns;
  if (whole) return store_floats(sums, out, true);
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    if (column + i < call.columns) narrow(sums[i], out[i]);
  }
}

}  // namespace specdec::cuda
