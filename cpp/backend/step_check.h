// Checks of a step's geometry against the pages that go with it, where both can be read. A step's
// page ids come from the executor; one made by hand may name anything.
#pragma once

#include "backend/step_view.h"

namespace specdec {

// std::invalid_argument unless the pool has the layer.
void check_layer(int layer, const KvCacheView& cache);

// std::invalid_argument, naming the field behind `owner` ("plan.", say), unless cu_rows begins with
// 0 and never decreases, lengths are not negative, every request with rows has all its pages in the
// table, each within the pool, and no tree has more rows than a mask has bits. num_rows is not
// read.
void check_pages(const StepView& step, const KvCacheView& cache, const char* owner);

}  // namespace specdec
