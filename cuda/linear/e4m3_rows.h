// Rows of x as e4m3 numbers (algo/e4m3_row.h), for the products of WeightFormat::kF8_A8.
#pragma once

#include <cstdint>

#include "backend/linear_op.h"

namespace specdec::cuda {

// Bytes of a row of e4m3 numbers: whole stages of k, with zeros behind `depth`.
constexpr std::int32_t e4m3_pitch(std::int32_t depth) {
  return (depth + kStreamDepth - 1) / kStreamDepth * kStreamDepth;
}

// Where the numbers of x go: as bytes [rows, e4m3_pitch(depth)] in the order of k in which
// hopper_e4m3.cuh multiplies them, or as numbers of the call's dtype [rows, depth].
struct E4m3Rows {
  void* numbers = nullptr;
  float* scales = nullptr;  // [rows]
  bool bytes = false;

  constexpr std::int64_t row_bytes(std::int32_t depth) const {
    return bytes ? e4m3_pitch(depth) : std::int64_t{2} * depth;
  }
};

void round_rows(const LinearParams& call, const E4m3Rows& to);

}  // namespace specdec::cuda
