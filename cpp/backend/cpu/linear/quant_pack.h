// Where a group of 32 elements of one column lies in a step of a panel (quant_kernels.h).
#pragma once

#include <cstddef>

#include "backend/cpu/linear/weight_type.h"

namespace specdec::cpu {

void pack_group(WeightType type, const Group& group, int column, std::byte* step);
// The inverse, bit for bit.
Group unpack_group(WeightType type, const std::byte* step, int column);

}  // namespace specdec::cpu
