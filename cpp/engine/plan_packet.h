// A step plan as words, for ranks that run a share of its forward pass.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/step_plan.h"

namespace specdec {

// What a forward pass reads of `plan`, and the K/V moves that are due before it; pages behind a
// request's last row are left out.
std::vector<std::int32_t> pack_plan(const StepPlan& plan, int page_size);

// The plan again, in memory that grows where it is too small. Errors: std::invalid_argument for
// words that are no plan.
void unpack_plan(const std::int32_t* words, std::int64_t count, StepPlan* plan);

}  // namespace specdec
