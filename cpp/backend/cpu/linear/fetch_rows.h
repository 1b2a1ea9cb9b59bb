// Rows of y fetched before they are computed. For the files of one instruction set each: inlined
// there, because GCC takes a function that only prefetches for one without effect.
#pragma once

#include <cstdint>

namespace specdec::cpu {

// Fetches a panel's 32 columns of `rows` rows of y, to be written (prefetchw). Without it
// 512 rows whose y lies in memory take a fifth longer: a store to a line that is not near keeps its
// place in the core's queue until the line comes, and a tile ends with all its stores together.
inline __attribute__((always_inline)) void fetch_to_write(const float* y, std::int64_t y_stride,
                                                          int rows) {
#pragma GCC unroll 32
  for (int m = 0; m < rows; ++m, y += y_stride) {
    __builtin_prefetch(y, /*rw=*/1);
    __builtin_prefetch(y + 16, /*rw=*/1);
  }
}

}  // namespace specdec::cpu
