#include "linear/packed_matrix.h"

namespace specdec::cuda {

void launch_packed_bf16(const LinearLaunch& launch, std::int32_t row_tile, dim3 grid) {
  launch_packed<__nv_bfloat16>(launch, row_tile, grid);
}

}  // namespace specdec::cuda
