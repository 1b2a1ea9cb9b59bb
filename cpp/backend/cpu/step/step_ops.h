// The CPU operations that derive a step's geometry. They run on the calling thread: a step has a
// few thousand small integers. Page ids and lengths were checked at the edge; parents were not.
#pragma once

#include "backend/ops.h"

namespace specdec::cpu {

void build_step(const BuildStepParams& params);
void pack_mask(const PackMaskParams& params);

}  // namespace specdec::cpu
