// The matrix kernels by dtype and format of the weight, an instance for each of kLinearTiles.
#pragma once

#include "backend/linear_instance.h"
#include "linear/linear.cuh"

namespace specdec::cuda {

template <class Weights>
void launch_tile(const LinearLaunch& launch, std::int32_t row_tile, dim3 grid) {
  switch (row_tile) {
    case 8:
      return launch_linear<LinearConfig<Weights, 8, true>>(launch, grid);
    case 16:
      return launch_linear<LinearConfig<Weights, 16, true>>(launch, grid);
    case 32:
      return launch_linear<LinearConfig<Weights, 32, false>>(launch, grid);
    case 64:
      return launch_linear<LinearConfig<Weights, 64, false>>(launch, grid);
    default:
      return launch_linear<LinearConfig<Weights, 128, false>>(launch, grid);
  }
}

void launch_tile_bf16(const LinearLaunch& launch, std::int32_t row_tile, dim3 grid);
void launch_tile_f16(const LinearLaunch& launch, std::int32_t row_tile, dim3 grid);
// For a packed weight; in packed_*.cu, and for 9.0 in instances/hopper_packed_*.cu.
template <class T, WeightFormat kFormat>
void launch_packed(const LinearLaunch& launch, std::int32_t row_tile, dim3 grid);
template <class T, WeightFormat kFormat>
void launch_hopper_packed(const LinearLaunch& launch, StreamTile tile, dim3 grid);
// For kF8_A8 on 9.0, with x from round_rows(); in instances/hopper_e4m3_*.cu.
template <class T>
void launch_hopper_e4m3(const LinearLaunch& launch, StreamTile tile, dim3 grid);

}  // namespace specdec::cuda
