#include "linear/packed_matrix.h"

namespace specdec::cuda {

template void launch_packed<__nv_bfloat16, WeightFormat::kQ8_G>(const LinearLaunch&, std::int32_t,
                                                                dim3);
template void launch_packed<__nv_bfloat16, WeightFormat::kQ5_K>(const LinearLaunch&, std::int32_t,
                                                                dim3);
template void launch_packed<__nv_bfloat16, WeightFormat::kQ6_K>(const LinearLaunch&, std::int32_t,
                                                                dim3);
template void launch_packed<__nv_bfloat16, WeightFormat::kF8_G>(const LinearLaunch&, std::int32_t,
                                                                dim3);

}  // namespace specdec::cuda
