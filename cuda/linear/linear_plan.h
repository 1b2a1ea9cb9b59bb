// Which kernel serves a call, and how its work is cut over blocks. Pure functions of shapes, tested
// without a GPU. Nothing here can change a result: backend/linear_op.h fixes the arithmetic.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backend/linear_op.h"

namespace specdec::cuda {

// A block makes an output tile of row_tile x column_tile. `narrow` ones have warps that share the
// columns and split k; the others have warps that split the tile.
struct LinearTile {
  std::int32_t row_tile, column_tile;
  bool narrow;
};
inline constexpr LinearTile kLinearTiles[] = {
    {8, 32, true}, {16, 32, true}, {32, 128, false}, {64, 128, false}, {128, 128, false}};

// Blocks that keep a large GPU's memory busy: about one for each multiprocessor.
inline constexpr std::int32_t kLinearEnoughBlocks = 120;
// Partial sums of one launch that has all the scratch it wants; more rows are served in several.
inline constexpr std::int64_t kLinearMaxPartialBytes = std::int64_t{128} << 20;

// A unit is the run of parts that one block computes: one part, a group, or all.
struct LinearPlan {
  LinearTile tile;
  std::int32_t row_tiles, column_tiles;
  std::int32_t parts_per_unit, units;
  std::int64_t pitch;      // floats of a row of one unit's partial sums
  std::int64_t row_bytes;  // of all units' partial sums of a row; 0: one unit, none
};

constexpr LinearTile linear_tile(std::int32_t rows) {
  for (const LinearTile& tile : kLinearTiles) {
    if (rows <= tile.row_tile) return tile;
  }
  return kLinearTiles[std::size(kLinearTiles) - 1];
}

constexpr LinearPlan plan_linear(std::int32_t rows, std::int32_t columns, std::int32_t depth) {
  const LinearCut cut = linear_cut(depth);
  LinearPlan plan{};
  plan.tile = linear_tile(rows);
  plan.row_tiles = (rows - 1) / plan.tile.row_tile + 1;
  plan.column_tiles = (columns - 1) / plan.tile.column_tile + 1;
  const std::int64_t blocks = std::int64_t{plan.row_tiles} * plan.column_tiles;
  if (plan.tile.narrow) {
    const bool enough = cut.groups == 1 || blocks >= kLinearEnoughBlocks;
    plan.parts_per_unit = enough ? cut.parts() : kLinearGroupParts;
  } else {
    // Accumulators of the tile, of the part and of the group fill the registers: one group.
    const bool enough = blocks * cut.groups >= kLinearEnoughBlocks || depth <= kLinearChunk;
    plan.parts_per_unit = enough ? kLinearGroupParts : 1;
  }
  plan.units = cut.parts() / plan.parts_per_unit;
  plan.pitch = (std::int64_t{columns} + 7) / 8 * 8;
  plan.row_bytes = plan.units == 1 ? 0 : plan.units * plan.pitch * std::int64_t{sizeof(float)};
  return plan;
}

// A grid's second dimension, which fold_linear_kernel has a row's sums in.
inline constexpr std::int64_t kMostFoldedRows = 65535;

// Rows of one launch with so many bytes of scratch: all, or whole tiles if one fits.
constexpr std::int32_t rows_per_launch(std::int64_t row_bytes, std::int32_t row_tile,
                                       std::int32_t rows, std::int64_t scratch_bytes) {
  if (row_bytes == 0) return rows;
  const std::int64_t most = std::min(scratch_bytes / row_bytes, kMostFoldedRows);
  if (rows <= most) return rows;
  const auto fit = static_cast<std::int32_t>(most);
  return fit < row_tile ? fit : fit / row_tile * row_tile;
}
static_assert(rows_per_launch(0, 128, 70000, 0) == 70000);
static_assert(rows_per_launch(1024, 128, 70000, 128 << 20) == 65408, "whole tiles");
static_assert(rows_per_launch(1024, 128, 65535, 128 << 20) == 65535);
static_assert(rows_per_launch(1024, 128, 300, 200 << 10) == 128);
static_assert(rows_per_launch(1024, 128, 300, 100 << 10) == 100);

}  // namespace specdec::cuda
