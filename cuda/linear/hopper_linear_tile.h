// Sizes of the linear layer's kernels for sm_90a (hopper_linear.cuh, hopper_packed.cuh,
// hopper_e4m3.cuh). Plain constants: the instance table and the choice of a kernel read them
// without a GPU compiler.
#pragma once

#include <cstdint>

#include "backend/linear_op.h"

namespace specdec::cuda {

// kRows_: of x in a tile, the N of the matrix instruction. kGroups: consumer warpgroups, each with
// 64 columns, the M of the instruction. They share x, which then crosses L2 for half the blocks.
// kBlocks_: on a multiprocessor. With more than one, one fills its ring or stores its tile while
// another streams. kDepth_: k of a stage. kGroupPanelBytes: of weights, for 64 columns and 64 k.
// kRowElementBytes: of x.
template <int kRows_, int kGroups, int kBlocks_, int kDepth_, int kGroupPanelBytes,
          int kRowElementBytes = 2>
struct HopperStreamTile {
  static constexpr int kRows = kRows_;
  static constexpr int kGroupColumns = kStreamColumns;
  static constexpr int kColumns = kGroups * kGroupColumns;
  static_assert(kGroupColumns == 64 && kRows % 8 == 0 && kRows <= 128);

  // Behind the consumers one warp has the copy engine bring weights, another brings x. Four groups
  // of many rows need more registers than an even share (96): they take those of the loaders, a
  // whole warpgroup then, since registers change hands by warpgroups.
  static constexpr int kConsumers = kGroups * 128;
  static constexpr int kConsumerWarps = kConsumers / 32;
  static constexpr bool kHandsOver = kGroups == 4 && kRows > 64;
  static constexpr int kLoaderRegisters = 24, kConsumerRegisters = 112;
  static constexpr int kThreads = kConsumers + (kHandsOver ? 128 : 64);
  static constexpr int kBlocks = kBlocks_;

  // A stage is kDepth of k: panels of 64 of the block's weights (lines of 128 bytes if they are not
  // packed, the widest swizzle), then of x.
  static constexpr int kPanelDepth = 64;
  static constexpr int kDepth = kDepth_;
  static constexpr int kPanels = kDepth / kPanelDepth;
  static_assert(kStreamDepth % kDepth == 0, "slices begin at whole stages");
  static constexpr int kWeightPanelBytes = kGroups * kGroupPanelBytes;
  static constexpr int kWeightBytes = kPanels * kWeightPanelBytes;
  // x in lines of 128 bytes: its panels have 64 k of 16 bits, or 128 of 8.
  static constexpr int kRowElement = kRowElementBytes;
  static constexpr int kLineDepth = 128 / kRowElement;
  static constexpr int kRowPanels = kDepth / kLineDepth;
  static constexpr int kRowPanelBytes = kRows * 128;
  static constexpr int kRowBytes = kRowPanels * kRowPanelBytes;
  static constexpr int kStageBytes = kWeightBytes + kRowBytes;
  static constexpr int kChain = kStreamChain / kDepth;  // stages

  // A multiprocessor has 228 KB, and a block takes 1 KB more than it asks for; 512 bytes are for
  // barriers, and the size is rounded to whole KB.
  static constexpr int kRoom = (((228 << 10) / kBlocks - 1024) & ~1023) - 512;
  static constexpr int kStages = kRoom / kStageBytes < 12 ? kRoom / kStageBytes : 12;
  static_assert(kStages >= 3);

  // The finished tile, where the ring was: a row's columns as floats, padded so that a fragment's 8
  // columns by 4 pairs of rows lie in 32 banks.
  static constexpr int kTilePitch = kColumns + 4;
  static_assert(kRows * kTilePitch * 4 <= kStages * kStageBytes);
};

// A tile of 16-bit weights. For two blocks of two groups there are no registers. A stage is one
// panel where x or columns make it large.
template <int kRows, int kGroups>
struct HopperLinearTile : HopperStreamTile<kRows, kGroups, kGroups == 1 ? 2 : 1,
                                           kRows <= 32 && kGroups == 1 ? 128 : 64, 64 * 128> {
  // 64 KB of weights in the stages of all blocks are twice what memory's latency needs.
  static_assert(HopperLinearTile::kStages >= 4 && HopperLinearTile::kBlocks *
                                                          HopperLinearTile::kStages *
                                                          HopperLinearTile::kWeightBytes >=
                                                      64 << 10);
};

// A tile of packed weights: two of 32 columns to a group. A stage is two panels, so that the two
// operands that its consumers use in turn are named in their text.
template <WeightFormat kFormat, int kRows, int kGroups>
struct HopperPackedTile : HopperStreamTile<kRows, kGroups, kGroups == 1 ? (kRows <= 32 ? 4 : 2) : 1,
                                           128, 2 * packed_layout(kFormat).tile_bytes()> {};

// The same with x in e4m3: the operands are what the tiles hold, so there is no loop to name them
// in.
template <int kRows, int kGroups>
struct HopperE4m3Tile
    : HopperStreamTile<kRows, kGroups, kGroups == 1 ? (kRows <= 32 ? 4 : 2) : 1, 128,
                       2 * packed_layout(WeightFormat::kF8_A8).tile_bytes(), 1> {};

// Shared memory of a block.
template <class Tile>
struct HopperLinearShared {
  alignas(1024) unsigned char weights[Tile::kStages][Tile::kWeightBytes];
  alignas(1024) unsigned char rows[Tile::kStages][Tile::kRowBytes];
  std::uint64_t full[Tile::kStages];  // both operands are there
  std::uint64_t free[Tile::kStages];  // all consumers have read the stage
};

}  // namespace specdec::cuda
