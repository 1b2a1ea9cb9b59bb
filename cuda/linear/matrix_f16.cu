#include "linear/element_weights.cuh"
#include "linear/matrix.h"

namespace specdec::cuda {

void launch_tile_f16(const LinearLaunch& launch, std::int32_t row_tile, dim3 grid) {
  launch_tile<ElementWeights<__half>>(launch, row_tile, grid);
}

}  // namespace specdec::cuda
