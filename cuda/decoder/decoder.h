// Launchers of the kernels between a decoder's matrix products. Params and semantics:
// backend/row_ops.h. Each enqueues on exec.stream and returns; docs/kernels/row_ops.md.
#pragma once

#include "backend/row_ops.h"

namespace specdec::cuda {

void rms_norm(const RmsNormParams& params);
void gated_activation(const GatedActivationParams& params);

}  // namespace specdec::cuda
