// The matrix kernels of packed weights, by format.
#pragma once

#include "linear/matrix.h"
#include "linear/packed_weights.cuh"

namespace specdec::cuda {

template <class T>
void launch_packed(const LinearLaunch& launch, std::int32_t row_tile, dim3 grid) {
  switch (launch.call.format) {
    case WeightFormat::kQ8_0:
      return launch_tile<PackedWeights<T, WeightFormat::kQ8_0>>(launch, row_tile, grid);
    case WeightFormat::kQ4_0:
      return launch_tile<PackedWeights<T, WeightFormat::kQ4_0>>(launch, row_tile, grid);
    default:
      return launch_tile<PackedWeights<T, WeightFormat::kQ4_1>>(launch, row_tile, grid);
  }
}

}  // namespace specdec::cuda
