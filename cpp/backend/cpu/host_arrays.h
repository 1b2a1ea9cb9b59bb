// Arrays of floats on the host: conversions, a search for values that are not finite, the best of a
// row. All run on the pool's threads; no result depends on how many these are.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace specdec::cpu {

// Both dtypes are float32, bfloat16 or float16; to the nearest, ties to even.
void convert_floats(const void* from, DType from_dtype, void* to, DType to_dtype, std::int64_t n);

// NaN and infinity among n values, of float32, bfloat16 or float16.
std::int64_t count_not_finite(const void* data, DType dtype, std::int64_t n);

// ids[rows, k]: the indices of the k largest scores of each row, the largest first, of equal ones
// the lower index first. A NaN is above everything. 1 <= k <= columns.
void best_scores(const float* scores, std::int64_t rows, std::int64_t columns, int k,
                 std::int32_t* ids);

}  // namespace specdec::cpu
