// Sizes of the linear layer's kernel for sm_90a (hopper_linear.cuh). Plain constants: the instance
// table and the choice of a kernel read them without a GPU compiler.
#pragma once

#include <cstdint>

#include "backend/linear_op.h"

namespace specdec::cuda {

// kRows_: of x in a tile, the N of the matrix instruction.
template <int kRows_>
struct HopperLinearTile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kStreamColumns;  // the instruction's M
  static_assert(kColumns == 64 && kRows % 8 == 0 && kRows <= 128);

  // One warpgroup multiplies, one warp has the copy engine bring the operands.
  static constexpr int kConsumers = 128;
  static constexpr int kConsumerWarps = kConsumers / 32;
  static constexpr int kThreads = kConsumers + 32;

  // A stage is kStreamDepth of k: panels of 64 (lines of 128 bytes, the widest swizzle) of the
  // block's weights, then of x.
  static constexpr int kPanelDepth = 64;
  static constexpr int kPanels = kStreamDepth / kPanelDepth;
  static constexpr int kWeightPanelBytes = kColumns * 128;
  static constexpr int kRowPanelBytes = kRows * 128;
  static constexpr int kWeightBytes = kPanels * kWeightPanelBytes;
  static constexpr int kRowBytes = kPanels * kRowPanelBytes;
  static constexpr int kStageBytes = kWeightBytes + kRowBytes;
  static constexpr int kChain = kStreamChain / kStreamDepth;  // stages

  // Four stages of weights, 64 KB, are twice what memory's latency needs on every multiprocessor.
  static constexpr int kRoom = (227 << 10) - 1024;
  static constexpr int kStages = kRoom / kStageBytes < 10 ? kRoom / kStageBytes : 10;
  static_assert(kStages >= 4);

  // Blocks that share x, each with columns of its own: x crosses L2 once for all of them, so that
  // it adds at most a quarter to the weights (kRows / (64 kCluster)).
  static constexpr int kCluster = kRows <= 16 ? 1 : kRows == 32 ? 2 : kRows == 64 ? 4 : 8;

  // The finished tile, where the ring was: a row's columns as floats, padded so that a fragment's 8
  // columns by 4 pairs of rows lie in 32 banks.
  static constexpr int kTilePitch = kColumns + 4;
  static_assert(kRows * kTilePitch * 4 <= kStages * kWeightBytes);
};

// Shared memory of a block.
template <class Tile>
struct HopperLinearShared {
  alignas(1024) unsigned char weights[Tile::kStages][Tile::kWeightBytes];
  alignas(1024) unsigned char rows[Tile::kStages][Tile::kRowBytes];
  std::uint64_t full[Tile::kStages];       // both operands are there
  std::uint64_t free[Tile::kStages];       // this block's warps have read the stage
  std::uint64_t rows_free[Tile::kStages];  // all warps of the cluster have
};

}  // namespace specdec::cuda
