// Rows of x as e4m3 numbers (algo/e4m3_row.h), for the products of WeightFormat::kF8_A8.
#pragma once

#include <cstdint>

#include "backend/linear_op.h"

namespace specdec::cuda {

// Bytes of a row of e4m3 numbers: whole stages of k, with zeros behind `depth`.
constexpr std::int32_t e4m3_pitch(std::int32_t depth) {
  return (depth + kStreamDepth - 1) / kStreamDepth * kStreamDepth;
}

// What is written: bytes [rows, e4m3_pitch(depth)] in the order of k in which hopper_e4m3.cuh
// multiplies them; bytes [rows, depth] as they come; numbers of the call's dtype [rows, depth].
enum class E4m3Order { kOfProducts, kPlain, kElements };

// Where the numbers of x go.
struct E4m3Rows {
  void* numbers = nullptr;
  float* scales = nullptr;  // [rows]
  E4m3Order order = E4m3Order::kElements;

  constexpr std::int64_t row_bytes(std::int32_t depth) const {
    switch (order) {
      case E4m3Order::kOfProducts:
        return e4m3_pitch(depth);
      case E4m3Order::kPlain:
        return depth;
      default:
        return std::int64_t{2} * depth;
    }
  }
};

// Reads the call's x, rows, depth and stream.
void round_rows(const LinearParams& call, const E4m3Rows& to);

void e4m3_rows(const E4m3RowsParams& params);

}  // namespace specdec::cuda
