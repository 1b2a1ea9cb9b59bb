// Parameters of the linear layer of a few rows, and its arithmetic. Conventions: ops.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/ops.h"
#include "base/types.h"

namespace specdec {

// out = x weight^T (+ bias): sums in float32, the bias added to the sum, rounded once.
// A row's bits depend on that row, the weight and the bias alone: not on how many rows the call has
// nor on the row's place (docs/kernels/linear.md).
struct LinearParams {
  const void* x = nullptr;       // [rows, depth]
  const void* weight = nullptr;  // [columns, depth]
  const void* bias = nullptr;    // [columns] contiguous; null: none
  void* out = nullptr;           // [rows, columns]
  std::int64_t x_row_stride = 0, weight_row_stride = 0, out_row_stride = 0;  // elements
  std::int32_t rows = 0, columns = 0, depth = 0;
  DType dtype = DType::kF32;  // of all of them: f32, f16 or bf16
  // The weight was there before the stream's last kernel was enqueued, so a device may read it
  // while that one still runs.
  bool constant_weight = false;
  ExecutionContext exec;
};

struct ScratchBytes {
  std::int64_t needed = 0, wanted = 0;
};

// How the matrix kernels of a device cut k, from its length alone. A chain of multiply-adds runs
// over the k of one part; a group's value is the left fold of its parts, an element that of its
// groups. A part may be empty: its value is +0. Which block or warp computes a part is free.
inline constexpr std::int32_t kLinearGroupParts = 4;
inline constexpr std::int32_t kLinearGroupDepth = 4096;  // at most
inline constexpr std::int32_t kLinearChunk = 64;         // k of one stage of copies

struct LinearCut {
  std::int32_t groups = 1;
  std::int32_t part_depth = kLinearChunk;  // of every part but the last that is not empty

  constexpr std::int32_t parts() const { return groups * kLinearGroupParts; }
};

constexpr LinearCut linear_cut(std::int32_t depth) {
  LinearCut cut;
  cut.groups = std::max(1, (depth - 1) / kLinearGroupDepth + 1);
  const std::int32_t even = (depth - 1) / (cut.groups * kLinearGroupParts) + 1;
  cut.part_depth = (even + kLinearChunk - 1) / kLinearChunk * kLinearChunk;
  return cut;
}

}  // namespace specdec
