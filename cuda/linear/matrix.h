// The matrix kernels by dtype, an instance for each of kLinearTiles.
#pragma once

#include "linear/linear.cuh"

namespace specdec::cuda {

template <class T>
void launch_tile(const LinearLaunch& launch, std::int32_t row_tile, dim3 grid) {
  switch (row_tile) {
    case 8:
      return launch_linear<LinearConfig<T, 8, true>>(launch, grid);
    case 16:
      return launch_linear<LinearConfig<T, 16, true>>(launch, grid);
    case 32:
      return launch_linear<LinearConfig<T, 32, false>>(launch, grid);
    case 64:
      return launch_linear<LinearConfig<T, 64, false>>(launch, grid);
    default:
      return launch_linear<LinearConfig<T, 128, false>>(launch, grid);
  }
}

void launch_tile_bf16(const LinearLaunch& launch, std::int32_t row_tile, dim3 grid);
void launch_tile_f16(const LinearLaunch& launch, std::int32_t row_tile, dim3 grid);

}  // namespace specdec::cuda
