// Launcher of the unpacking of weights (UnpackWeightParams, backend/linear_op.h). It enqueues on
// exec.stream and returns; docs/kernels/linear.md.
#pragma once

#include "backend/linear_op.h"

namespace specdec::cuda {

void unpack_weight(const UnpackWeightParams& params);

}  // namespace specdec::cuda
