// Which kernel for 9.0 serves a product, and how its work is dealt. Pure functions of the problem
// and of the device's limits, tested without a GPU. Nothing here can change a result:
// linear_op.h fixes the arithmetic.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "backend/device_limits.h"
#include "backend/linear_instances.h"
#include "backend/linear_op.h"

namespace specdec {

struct LinearProblem {
  std::int32_t rows = 0, columns = 0, depth = 0;
  DType dtype = DType::kF32;
  bool aligned = false;   // rows of both matrices begin at multiples of 16 bytes
  bool overlaps = false;  // rows of the weight share memory, which no copy engine can describe
};

// Bytes of so many elements of the weight, and of x, as a packed tile has.
struct StreamedBytes {
  static constexpr std::int32_t kElements = PackedLayout::kColumns * PackedLayout::kDepth;
  std::int32_t weight = 2 * kElements, rows = 2 * kElements;
};
constexpr StreamedBytes streamed_bytes(WeightFormat format) {
  StreamedBytes bytes;
  if (format != WeightFormat::kElements) bytes.weight = packed_layout(format).tile_bytes();
  if (format == WeightFormat::kF8_A8) bytes.rows = StreamedBytes::kElements;
  return bytes;
}

// Blocks of such tiles for a product.
constexpr std::int64_t stream_blocks(const StreamTile& tile, const LinearProblem& problem) {
  const std::int64_t row_tiles = (problem.rows - 1) / tile.row_tile + 1;
  const std::int64_t column_tiles = (problem.columns - 1) / tile.columns + 1;
  return row_tiles * column_tiles * stream_cut(problem.columns, problem.depth).slices;
}

// What the busiest multiprocessor takes in of weights and x for each k of a slice, in units of
// `bytes`: the limit of more than a few rows.
constexpr std::int64_t busiest_intake(const StreamTile& tile, const LinearProblem& problem,
                                      const StreamedBytes& bytes, const DeviceLimits& limits) {
  const std::int64_t turns = (stream_blocks(tile, problem) - 1) / limits.num_sms + 1;
  const std::int64_t rows = (problem.rows - 1) / ((problem.rows - 1) / tile.row_tile + 1) + 1;
  return turns * (std::int64_t{tile.columns} * bytes.weight + rows * bytes.rows);
}

// Is `one`, which follows `best` in a sorted table, the better tile? The least that holds all rows;
// of more columns where a multiprocessor takes in less with it, unless the weights alone, at what
// memory gives of them, take longer than that: two thirds of what it could take in. A block of 256
// columns begins and ends slowly, and a slice is too short for that (measured, linear.md).
constexpr bool better_tile(const StreamTile& best, const StreamTile& one,
                           const LinearProblem& problem, const StreamedBytes& bytes,
                           const DeviceLimits& limits) {
  if (best.row_tile != one.row_tile) return best.row_tile < problem.rows;
  const std::int32_t slices = stream_cut(problem.columns, problem.depth).slices;
  if (one.columns > 128 && slices > 1) return false;
  const std::int64_t intake = busiest_intake(best, problem, bytes, limits);
  const std::int64_t weights = std::int64_t{problem.columns} * slices * bytes.weight;
  return 2 * intake * limits.num_sms > 3 * weights &&
         busiest_intake(one, problem, bytes, limits) < intake;
}

// The instance for a product; null: another family serves it. Whether it is null does not depend on
// the number of rows: the families sum in different orders.
constexpr const LinearInstance* pick_linear(const LinearProblem& problem,
                                            const DeviceLimits& limits) {
  if (limits.major != 9 || limits.minor != 0) return nullptr;
  if (problem.depth % 8 != 0 || !problem.aligned || problem.overlaps) return nullptr;
  const LinearInstance* best = nullptr;
  for (const LinearInstance& one : kLinearInstances) {
    if (one.dtype != problem.dtype) continue;
    if (one.smem_bytes > limits.shared_bytes) return nullptr;
    if (best == nullptr || better_tile(best->tile(), one.tile(), problem, {}, limits)) {
      best = &one;
    }
  }
  return best;
}

// Those of packed weights (cuda/linear/hopper_packed.cuh, hopper_e4m3.cuh), sorted; each exists for
// every format.
inline constexpr std::array<StreamTile, 7> kPackedTiles{
    {{8, 64}, {32, 64}, {64, 64}, {64, 128}, {96, 64}, {96, 128}, {128, 128}}};
inline constexpr std::int32_t kPackedSharedBytes = 227 << 10;  // that a block takes, at most

// The tile for a packed weight; null: the family for 8.0 serves it, whatever the rows.
constexpr const StreamTile* pick_packed(const LinearProblem& problem, WeightFormat format,
                                        const DeviceLimits& limits) {
  if (limits.major != 9 || limits.minor != 0) return nullptr;
  if (limits.shared_bytes < kPackedSharedBytes) return nullptr;
  const StreamTile* best = &kPackedTiles[0];
  for (const StreamTile& one : kPackedTiles) {
    if (&one != best && better_tile(*best, one, problem, streamed_bytes(format), limits)) {
      best = &one;
    }
  }
  return best;
}

// How tiles deal a product.
struct LinearDeal {
  std::int32_t row_tiles = 0, column_tiles = 0;
  StreamCut cut;
  std::int64_t pitch = 0;      // floats of a row of one slice's sums
  std::int64_t row_bytes = 0;  // of all slices' sums of a row; 0: one slice, none
};

// cut_columns: see LinearParams; never fewer than `columns`, so that there are no more slices.
constexpr LinearDeal deal_linear(const StreamTile& tile, std::int32_t rows, std::int32_t columns,
                                 std::int32_t depth, std::int32_t cut_columns = 0) {
  LinearDeal deal;
  deal.row_tiles = (rows - 1) / tile.row_tile + 1;
  deal.column_tiles = (columns - 1) / tile.columns + 1;
  deal.cut = stream_cut(std::max(columns, cut_columns), depth);
  deal.pitch = (std::int64_t{columns} + 7) / 8 * 8;
  if (deal.cut.slices > 1) {
    deal.row_bytes = deal.cut.slices * deal.pitch * std::int64_t{sizeof(float)};
  }
  return deal;
}

}  // namespace specdec
