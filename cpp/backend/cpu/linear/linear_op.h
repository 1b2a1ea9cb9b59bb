// The CPU's form of backend/linear_op.h, for weights that were not packed. Models on the CPU do not
// use it: they pack theirs once (packed_linear.h).
#pragma once

#include "backend/linear_op.h"

namespace specdec::cpu {

void linear(const LinearParams& params);

}  // namespace specdec::cpu
