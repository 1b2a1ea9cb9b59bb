// Sizes of the matrix kernels of the linear layer.
#pragma once

#include <cstdint>

#include "backend/linear_op.h"

namespace specdec::cuda {

// kRowTile tokens; kNarrow: four warps take a part of k each and share 32 columns; else warps own
// 32 columns by kWarpRows of a tile of 128 columns and walk k together. Weights: how a stage of
// weights is copied and becomes an operand (element_weights.cuh, packed_weights.cuh).
template <class Weights_, int kRowTile_, bool kNarrow_>
struct LinearConfig {
  using Weights = Weights_;
  using T = typename Weights::T;
  static constexpr int kRowTile = kRowTile_;
  static constexpr bool kNarrow = kNarrow_;
  static constexpr int kColumnTile = kNarrow ? 32 : 128;
  static constexpr int kWarpColumns = 32;
  static constexpr int kWarpRows =
      kNarrow || kRowTile < Weights::kWarpRows ? kRowTile : Weights::kWarpRows;
  static constexpr int kWarps =
      kNarrow ? kLinearGroupParts : kColumnTile / kWarpColumns * (kRowTile / kWarpRows);
  static constexpr int kThreads = 32 * kWarps;

  // Fragments of a warp: 16 columns by 8 rows each.
  static constexpr int kColumnFragments = kWarpColumns / 16;
  static constexpr int kRowFragments = kWarpRows / 8;
  // Blocks of a multiprocessor: as many as shared memory holds, where registers could have a say.
  static constexpr int kBlocks = kNarrow ? 2 : 1;
  static constexpr int kStepUnroll = kWarps > 8 ? 2 : 4;  // 128 registers have no room for more
  static constexpr int kSums = kColumnFragments * kRowFragments * 4;  // a lane

  // A ring of stages belongs to the threads that walk the same k; a stage holds kLinearChunk of k
  // of the columns' weights, then of the rows of x: lines of 128 bytes.
  static constexpr int kRings = kNarrow ? kWarps : 1;
  static constexpr int kRingThreads = kThreads / kRings;
  static constexpr int kLineBytes = kLinearChunk * static_cast<int>(sizeof(T));
  static constexpr int kLinePieces = kLineBytes / 16;
  static constexpr int kWeightBytes = Weights::stage_bytes(kColumnTile);
  static constexpr int kStageBytes = kWeightBytes + kRowTile * kLineBytes;
  static_assert(kLineBytes == 128, "swizzle() spreads 128 bytes over the 32 banks");

  // Behind the rings: the warps' parts of a group, where they are in several warps.
  static constexpr int kPartsBytes = kNarrow ? kWarps * kSums * 32 * 4 : 0;
  static constexpr int kFolds = kNarrow ? kSums * 32 / kThreads : 1;  // elements a thread folds
  static constexpr int kMostBytes = 99 << 10;  // the least that devices of 8.x give a block
  static constexpr int kFit = (kMostBytes - kPartsBytes) / (kRings * kStageBytes);
  static constexpr int kStages = kFit < 10 ? kFit : 10;
  static_assert(kStages >= 3);
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kPartsOffset = kRings * kRingBytes;
  static constexpr int kSharedBytes = kPartsOffset + kPartsBytes;

  // The finished tile, in the rings: rows of floats, padded so that a fragment's 8 columns by 4
  // rows lie in 32 banks.
  static constexpr int kTilePitch = kColumnTile + 4;
  static_assert(kRowTile * kTilePitch * 4 <= kRings * kRingBytes, "the tile takes the rings' room");

  // Byte offset in lines of 128 bytes of 16-byte piece `piece` of line `line`: 8 lines' pieces at
  // one k lie in 32 banks.
  static __host__ __device__ constexpr int swizzle(int line, int piece) {
    return line * kLineBytes + ((piece ^ (line & 7)) << 4);
  }
};

}  // namespace specdec::cuda
