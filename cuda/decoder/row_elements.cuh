// Rows of any number of columns, 8 at a time: in 16-byte words where the whole launch is aligned to
// that, else element by element with the last vector cut.
#pragma once

#include <cstdint>

#include "gpu/gpu.cuh"
#include "kv/elements.cuh"
#include "linear/sums.cuh"

namespace specdec::cuda {

using RowVector = float[kLaneElements];

template <class T>
__device__ __forceinline__ void load_vector(const T* row, int at, int columns, bool aligned,
                                            RowVector& x) {
  if (aligned) return load_floats(row + at, true, x);
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) x[i] = at + i < columns ? widen(row[at + i]) : 0.0f;
}

template <class T>
__device__ __forceinline__ void store_vector(const RowVector& x, T* row, int at, int columns,
                                             bool aligned) {
  if (aligned) return store_floats(x, row + at, true);
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    if (at + i < columns) narrow(x[i], row[at + i]);
  }
}

// Calls launch.template operator()<T>() with the device's type of a dtype.
template <class Launch>
void by_type(DType dtype, const Launch& launch) {
  switch (dtype) {
    case DType::kBF16:
      return launch.template operator()<__nv_bfloat16>();
    case DType::kF16:
      return launch.template operator()<__half>();
    default:
      return launch.template operator()<float>();
  }
}

}  // namespace specdec::cuda
