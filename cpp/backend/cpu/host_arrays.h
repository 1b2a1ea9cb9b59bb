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

}  // namespace specdec::cpu
