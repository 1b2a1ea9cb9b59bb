// The table of attention kernels with matrix instructions. Its rows are generated together with the
// kernels' instantiations (scripts/gen_instances.py); a row's index is its launcher's.
#pragma once

#include <span>

#include "backend/attention/instance.h"

namespace specdec::attention {

std::span<const AttentionInstance> instances();

// "generic", "ampere", "hopper".
const char* family_name(Family family);

}  // namespace specdec::attention
