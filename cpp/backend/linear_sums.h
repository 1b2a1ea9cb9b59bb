// A product whose sums are still in pieces.
#pragma once

#include <cstdint>

namespace specdec {

// What linear() leaves in place of `out` where k is cut over blocks, if it is asked to. An element
// is the left fold of its groups, each the left fold of its units, times the row's scale, plus the
// bias, rounded to the dtype: whoever reads it adds up, and has the bits that `out` would have.
struct LinearSums {
  const float* units = nullptr;  // [num_units, rows, columns]; null: nothing is left to add up
  std::int64_t unit_stride = 0, row_stride = 0;  // floats; whole groups of 8, as are the columns
  std::int32_t num_units = 0, units_per_group = 1;
  const float* row_scales = nullptr;  // [rows]; null: 1
  const void* bias = nullptr;         // [columns] contiguous; null: none
};

}  // namespace specdec
