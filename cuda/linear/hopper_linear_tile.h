// Sizes of the linear layer's kernel for sm_90a (hopper_linear.cuh). Plain constants: the instance
// table and the choice of a kernel read them without a GPU compiler.
#pragma once

#include <cstdint>

#include "backend/linear_op.h"

namespace specdec::cuda {

// kRows_: of x in a tile, the N of the matrix instruction. kGroups: consumer warpgroups, each with
// 64 columns, the M of the instruction. They share x, which then crosses L2 for half the blocks.
template <int kRows_, int kGroups>
struct HopperLinearTile {
  static constexpr int kRows = kRows_;
  static constexpr int kGroupColumns = kStreamColumns;
  static constexpr int kColumns = kGroups * kGroupColumns;
  static_assert(kGroupColumns == 64 && kRows % 8 == 0 && kRows <= 128);

  // Behind the consumers one warp has the copy engine bring weights, another brings x.
  static constexpr int kConsumers = kGroups * 128;
  static constexpr int kConsumerWarps = kConsumers / 32;
  static constexpr int kThreads = kConsumers + 64;
  // Blocks on a multiprocessor. With two, one fills its ring or stores its tile while the other
  // streams; for two blocks of two groups there are no registers.
  static constexpr int kBlocks = kGroups == 1 ? 2 : 1;

  // A stage is kDepth of k: panels of 64 (lines of 128 bytes, the widest swizzle) of the block's
  // weights, then of x. One panel where x makes it large.
  static constexpr int kPanelDepth = 64;
  static constexpr int kDepth = kRows <= 32 ? 2 * kPanelDepth : kPanelDepth;
  static constexpr int kPanels = kDepth / kPanelDepth;
  static_assert(kStreamDepth % kDepth == 0, "slices begin at whole stages");
  static constexpr int kWeightPanelBytes = kColumns * 128;
  static constexpr int kRowPanelBytes = kRows * 128;
  static constexpr int kWeightBytes = kPanels * kWeightPanelBytes;
  static constexpr int kRowBytes = kPanels * kRowPanelBytes;
  static constexpr int kStageBytes = kWeightBytes + kRowBytes;
  static constexpr int kChain = kStreamChain / kDepth;  // stages

  // A multiprocessor has 228 KB, and a block takes 1 KB more than it asks for; 512 bytes are for
  // barriers. 64 KB of weights in the stages of all blocks are twice what memory's latency needs.
  static constexpr int kRoom = (228 << 10) / kBlocks - 1024 - 512;
  static constexpr int kStages = kRoom / kStageBytes;
  static_assert(kStages >= 4 && kBlocks * kStages * kWeightBytes >= 64 << 10);

  // The finished tile, where the ring was: a row's columns as floats, padded so that a fragment's 8
  // columns by 4 pairs of rows lie in 32 banks.
  static constexpr int kTilePitch = kColumns + 4;
  static_assert(kRows * kTilePitch * 4 <= kStages * kStageBytes);
};

// Shared memory of a block.
template <class Tile>
struct HopperLinearShared {
  alignas(1024) unsigned char weights[Tile::kStages][Tile::kWeightBytes];
  alignas(1024) unsigned char rows[Tile::kStages][Tile::kRowBytes];
  std::uint64_t full[Tile::kStages];  // both operands are there
  std::uint64_t free[Tile::kStages];  // all consumers have read the stage
};

}  // namespace specdec::cuda
