#include "linear/element_weights.cuh"
#include "linear/matrix.h"

namespace specdec::cuda {

void launch_tile_bf16(const LinearLaunch& launch, std::int32_t row_tile, dim3 grid) {
  launch_tile<ElementWeights<__nv_bfloat16>>(launch, row_tile, grid);
}

}  // namespace specdec::cuda
