// Launcher of the linear layer of a few rows. Params and arithmetic: backend/linear_op.h. It
// enqueues on exec.stream and returns; docs/kernels/linear.md.
#pragma once

#include <cstdint>

#include "backend/device_limits.h"
#include "backend/linear_op.h"

namespace specdec::cuda {

void linear(const LinearParams& params, const DeviceLimits& limits);

// Scratch for partial sums, where k is cut over blocks, and for rows of x that are rounded, on
// whichever device. With less than it wants a call takes several launches.
ScratchBytes linear_scratch_bytes(std::int32_t rows, std::int32_t columns, std::int32_t depth,
                                  DType dtype, WeightFormat format);

}  // namespace specdec::cuda
