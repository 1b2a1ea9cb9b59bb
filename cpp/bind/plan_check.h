// Checks of a step plan against the pages that a model gives with it.
#pragma once

#include "backend/step_view.h"
#include "engine/step_plan.h"

namespace specdec {

// std::invalid_argument unless the pool has the layer.
void check_layer(int layer, const KvCacheView& cache);

// A plan's page ids come from the executor; a plan made by hand may name any.
void check_plan(const StepPlan& plan, const KvCacheView& cache);

}  // namespace specdec
