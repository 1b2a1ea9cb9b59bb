// Sizes of the Hopper family's kernel with e4m3 matrix operands (hopper_fp8.cuh): what a block of
// it takes for K and V of kDim numbers per key and kConsumers consumer warpgroups. Names are those
// of HopperTile (hopper_tile.h).
#pragma once

#include <cstdint>

#include "attention/hopper_tile.h"
#include "backend/attention/arithmetic.h"

namespace specdec::attention {

template <int kHeadDim, int kConsumerGroups>
struct HopperFp8Tile {
  static constexpr int kDim = kHeadDim;
  static constexpr int kConsumers = kConsumerGroups;
  static constexpr bool kWiden = false, kTranspose = true;
  static constexpr int kRowTile = 64 * kConsumers;
  static constexpr int kLoaders = 1;  // warpgroups that load and transpose
  static constexpr int kThreads = 128 * (kConsumers + kLoaders);
  static_assert(kDim == 128, "a key of K is one line of the 128-byte swizzle");
  static_assert(kConsumers == 1 || kConsumers == 2, "registers: sums of values are held twice");

  // K or V of a block of keys, as loaded and as transposed: one box, its rows are whole keys.
  static constexpr int kTileBytes = kBlockKeys * kDim;
  static constexpr int kLoadColumns = kDim;
  static constexpr int kLoadRowBytes = kDim;
  static constexpr int kLoadBoxes = 1;
  static constexpr int kLoadBytes = kTileBytes;
  static constexpr int kQueryBytes = 16;  // queries live in registers
  static constexpr bool kFoldInRegisters = false;
  static constexpr int kFoldBytes = kRowTile * kDim * 4;

  static constexpr bool kHandsOver = kConsumers > 1;
  static constexpr int kConsumerRegisters = 224;
  static constexpr int kProducerRegisters =
      producer_registers<kLoaders, kConsumers, kConsumerRegisters>();

  static constexpr int kSharedLimit = 227 * 1024;
  static constexpr int kStages = 6, kLoadStages = 6;  // of K and of V as loaded, 8 KB each
  static constexpr int kValueStages = 4;              // of transposed V
};

}  // namespace specdec::attention
