// Parameters of the linear layer of a few rows, and its arithmetic. Conventions: ops.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/ops.h"
#include "backend/packed_weight.h"
#include "base/types.h"

namespace specdec {

// out = x weight^T (+ bias): sums in float32, the bias added to the sum, rounded once.
// A row's bits depend on that row, the weight and the bias alone: not on how many rows the call has
// nor on the row's place (docs/kernels/linear.md).
struct LinearParams {
  const void* x = nullptr;       // [rows, depth]
  const void* weight = nullptr;  // [columns, depth]; packed tiles of the same, if `format` says so
  const void* bias = nullptr;    // [columns] contiguous; null: none
  void* out = nullptr;           // [rows, columns]
  std::int64_t x_row_stride = 0, weight_row_stride = 0, out_row_stride = 0;  // elements
  std::int32_t rows = 0, columns = 0, depth = 0;
  // Columns of the matrix whose bits are wanted, where `weight` is some of its: stream_cut() goes
  // by them. 0: by those of `weight`.
  std::int32_t cut_columns = 0;
  DType dtype = DType::kF32;  // of all of them: f32, f16 or bf16
  // With a packed weight: 16-bit dtypes, depths of whole groups, rows of x at multiples of 16
  // bytes. The result is that of kElements on the same device, with the weight rounded to the
  // dtype. With kF8_A8 each row of x is rounded to e4m3 with a scale of its own first
  // (algo/e4m3_row.h), which multiplies the row's sums before the bias is added. Devices of 9.0
  // then multiply e4m3 numbers: sums over 64 k, each times the column's scale, one added to the
  // other.
  WeightFormat format = WeightFormat::kElements;
  const float* row_scales = nullptr;  // [rows] of an x that is rounded already; null: 1
  // The weight was there before the stream's last kernel was enqueued, so a device may read it
  // while that one still runs.
  bool constant_weight = false;
  // Where to say what the call has left in pieces instead of writing out; null: out is written. It
  // is left in the workspace, if all rows fit there and the columns are whole groups of 8.
  LinearSums* left = nullptr;
  ExecutionContext exec;
};

struct ScratchBytes {
  std::int64_t needed = 0, wanted = 0;
};

// out = some columns of a packed weight as a matrix, for products of another library: the elements
// rounded to dtype (f16 or bf16), or, of e4m3 weights, their numbers without the scales (f8_e4m3).
struct UnpackWeightParams {
  const void* weight = nullptr;  // tiles of [whole, depth]
  void* out = nullptr;           // [columns, depth] contiguous, at a multiple of 16 bytes
  std::int32_t first = 0;        // column of the weight, a multiple of PackedLayout::kColumns
  std::int32_t columns = 0, depth = 0;
  DType dtype = DType::kBF16;  // of out
  WeightFormat format = WeightFormat::kQ8_0;
  ExecutionContext exec;
};

// Each row of x as e4m3 numbers and a scale (algo/e4m3_row.h). Depths are multiples of 16.
struct E4m3RowsParams {
  const void* x = nullptr;  // [rows, depth], rows at multiples of 16 bytes
  std::int64_t x_row_stride = 0;
  void* numbers = nullptr;  // [rows, depth] contiguous, at a multiple of 16 bytes
  float* scales = nullptr;  // [rows]
  std::int32_t rows = 0, depth = 0;
  DType dtype = DType::kBF16;  // of x: f16 or bf16
  ExecutionContext exec;
};

// How the matrix kernels for 8.0 cut k, from its length alone. A chain of multiply-adds runs
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

// How those for 9.0 (wgmma) do, from the matrix's shape. A chain of multiply-adds runs over at most
// kStreamChain k; a slice's value is the left fold of its chains, an element that of its slices.
// Each slice is one block's: few columns are cut so that as many blocks as a large device has
// multiprocessors read the weight.
inline constexpr std::int32_t kStreamColumns = 64;  // of a block
inline constexpr std::int32_t kStreamDepth = 128;   // k of one stage of copies
inline constexpr std::int32_t kStreamChain = 1024;  // also the least k of a slice, where cut
inline constexpr std::int32_t kStreamMaxSlices = 8;
inline constexpr std::int32_t kStreamBlocks = 256;  // so many keep all multiprocessors busy

struct StreamCut {
  std::int32_t slices = 1;
  std::int32_t slice_depth = kStreamDepth;  // of every slice but the last; none is empty
};

constexpr StreamCut stream_cut(std::int32_t columns, std::int32_t depth) {
  const std::int32_t tiles = (columns - 1) / kStreamColumns + 1;
  StreamCut cut;
  while (cut.slices < kStreamMaxSlices && std::int64_t{tiles} * cut.slices < kStreamBlocks &&
         depth / (2 * cut.slices) >= kStreamChain) {
    cut.slices *= 2;
  }
  const std::int32_t even = (depth - 1) / cut.slices + 1;
  cut.slice_depth = ((even - 1) / kStreamDepth + 1) * kStreamDepth;
  return cut;
}

}  // namespace specdec
