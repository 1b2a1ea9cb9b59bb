// Speculative attention on a device: chooses the kernels of a call and launches them.
#pragma once

#include "backend/device_limits.h"
#include "backend/ops.h"

namespace specdec::cuda {

// Enqueues on params.exec.stream. std::invalid_argument if no kernel can serve the call there or
// the workspace is smaller than plan_workspace() says.
void spec_attention(const SpecAttentionParams& params, const DeviceLimits& limits);

}  // namespace specdec::cuda
