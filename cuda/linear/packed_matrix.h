// The matrix kernels of packed weights: each packed_*.cu compiles those of some formats.
#pragma once

#include "linear/matrix.h"
#include "linear/packed_weights.cuh"

namespace specdec::cuda {

template <class T, WeightFormat kFormat>
void launch_packed(const LinearLaunch& launch, std::int32_t row_tile, dim3 grid) {
  launch_tile<PackedWeights<T, kFormat>>(launch, row_tile, grid);
}

}  // namespace specdec::cuda
