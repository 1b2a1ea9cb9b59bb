// The CPU's form of backend/row_ops.h. The native decoder does not use it: its rows never leave its
// own parallel region (row_ops.h).
#pragma once

#include "backend/row_ops.h"

namespace specdec::cpu {

void rms_norm(const RmsNormParams& params);
void gated_activation(const GatedActivationParams& params);

}  // namespace specdec::cpu
