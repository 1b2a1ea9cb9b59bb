// Sizes of the Hopper family's kernel (hopper.cuh): what a block of it takes for K and V of `kDim`
// numbers per key and kConsumers consumer warpgroups. HopperTile is of 16-bit matrix operands,
// HopperFp8Tile (hopper_fp8_tile.h) of e4m3; HopperShared serves both. Plain constants: the
// instance table and the choice of a kernel read them without a GPU compiler.
#pragma once

#include <cstdint>

#include "backend/attention/arithmetic.h"

namespace specdec::attention {

// Registers of a producer's thread if `kConsumers` warpgroups take kConsumerRegisters each. A block
// owns what it was launched with, an even share in steps of 8 per thread: setmaxnreg moves those
// registers between its warpgroups, and one that asks for more waits for ever. Of what the compiler
// made, `make cuda-check` proves the same.
template <int kLoaders, int kConsumers, int kConsumerRegisters>
constexpr int producer_registers() {
  constexpr int kGroups = kConsumers + kLoaders, kFile = 65536, kStep = 8, kLeast = 24;
  constexpr int kAtEntry = kFile / (128 * kGroups) / kStep * kStep;
  constexpr int kLeft = kGroups * kAtEntry - kConsumers * kConsumerRegisters;
  constexpr int kEach = kLeft / kLoaders / kStep * kStep;
  static_assert(kLeft >= 0 && kEach >= kLeast, "not what setmaxnreg can set");
  return kEach;
}

// What a consumer knows about one of its rows (RowView).
inline constexpr int kRowViewBytes = 32;

// kE4m3: K and V lie in memory as e4m3 and are widened to the queries' 16-bit type on the way.
template <int kHeadDim, int kConsumerGroups, bool kE4m3 = false>
struct HopperTile {
  static constexpr int kDim = kHeadDim;
  static constexpr int kConsumers = kConsumerGroups;
  static constexpr bool kWiden = kE4m3, kTranspose = false;
  static constexpr int kRowTile = 64 * kConsumers;  // wgmma takes 64 rows
  // One warpgroup loads. Two widen: three warps need twice the time of the products (measured).
  static constexpr int kLoaders = kWiden ? 2 : 1;
  static constexpr int kThreads = 128 * (kConsumers + kLoaders);
  static_assert(kConsumers + kLoaders <= 4, "registers");

  // K or V of a block of keys as the matrix instructions read it: boxes of 64 numbers (128 bytes,
  // the widest swizzle) side by side, each 64 keys tall. Columns from kDim on hold nothing.
  static constexpr int kBoxColumns = 64;
  static constexpr int kBoxes = (kDim + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kBoxBytes = kBlockKeys * kBoxColumns * 2;
  static constexpr int kTileBytes = kBoxes * kBoxBytes;

  // The same as the copy engine brings it: e4m3 in plain rows, to be widened into the boxes.
  static constexpr int kLoadColumns = kWiden ? kDim : kBoxColumns;
  static constexpr int kLoadRowBytes = kWiden ? kDim : 2 * kBoxColumns;
  static constexpr int kLoadBoxes = kWiden ? 1 : kBoxes;
  static constexpr int kLoadBytes = kLoadBoxes * kBlockKeys * kLoadRowBytes;

  // Queries live in registers (kDim / 4 of them) where those suffice: shared memory is then read
  // only for K and V, and its bandwidth is what could bound wgmma at 64 keys.
  static constexpr bool kQueriesInRegisters = kDim <= 64 || (kDim <= 128 && kConsumers <= 2);
  static constexpr int kQueryBytes = kQueriesInRegisters ? 16 : kConsumers * kTileBytes;
  // So does the sum over the chunks that a unit has finished (kDim / 2 registers). Widening needs
  // registers too.
  static constexpr bool kFoldInRegisters = kQueriesInRegisters && !(kWiden && kConsumers > 1);
  static constexpr int kFoldBytes = kFoldInRegisters ? 16 : kRowTile * kDim * 4;

  // Each of two warpgroups has what it needs, and nothing is handed over. Few columns leave
  // registers over, and a producer of 24 would spill there.
  static constexpr bool kHandsOver = kConsumers + kLoaders > 2;
  static constexpr int kConsumerRegisters = kConsumers == 3             ? 160
                                            : kWiden && kConsumers == 2 ? 208
                                            : kDim <= 64                ? 224
                                                                        : 240;
  static constexpr int kProducerRegisters =
      producer_registers<kLoaders, kConsumers, kConsumerRegisters>();

  // Stages of 16-bit tiles and, if widened, of e4m3 tiles. A stage is K and V of 64 keys. Six of 32
  // KB cover the latency of memory at full rate several times over.
  static constexpr int kSharedLimit = 227 * 1024;
  static constexpr int kRoom =
      kSharedLimit - kQueryBytes - kFoldBytes - kRowTile * kRowViewBytes - 512;
  static constexpr int at_most(int n, int limit) { return n < limit ? n : limit; }
  static constexpr int kStages = kWiden ? at_most((kRoom - 4 * kLoadBytes) / (2 * kTileBytes), 3)
                                        : at_most(kRoom / (2 * kTileBytes), 6);
  static constexpr int kValueStages = kStages;
  static constexpr int kLoadStages =
      kWiden ? at_most((kRoom - kStages * 2 * kTileBytes) / (2 * kLoadBytes), 5) : kStages;
  static_assert(kStages >= 1 && kLoadStages >= 2, "loading has to run ahead of computing");
};

// The barriers of a ring of stages.
template <int kStages>
struct HopperRing {
  std::uint64_t full[kStages], empty[kStages];
};

// Shared memory of a block. Boxes lie at multiples of 1024 bytes, as their swizzle wants. Where the
// consumers cannot read what the copy engine brings, that has a ring of its own ("raw").
template <class Tile>
struct HopperShared {
  static constexpr bool kRawKeys = Tile::kWiden, kRawValues = Tile::kWiden || Tile::kTranspose;
  static constexpr int kRawKeyStages = kRawKeys ? Tile::kLoadStages : 1;
  static constexpr int kRawValueStages = kRawValues ? Tile::kLoadStages : 1;

  alignas(1024) unsigned char k[Tile::kStages][Tile::kTileBytes];
  alignas(1024) unsigned char v[Tile::kValueStages][Tile::kTileBytes];
  alignas(1024) unsigned char q[Tile::kQueryBytes];
  alignas(128) unsigned char raw_k[kRawKeyStages][kRawKeys ? Tile::kLoadBytes : 16];
  alignas(128) unsigned char raw_v[kRawValueStages][kRawValues ? Tile::kLoadBytes : 16];
  alignas(16) unsigned char fold[Tile::kFoldBytes];
  alignas(16) unsigned char rows[Tile::kRowTile * kRowViewBytes];
  HopperRing<Tile::kStages> k_ready;
  HopperRing<Tile::kValueStages> v_ready;
  HopperRing<kRawKeyStages> k_raw;
  HopperRing<kRawValueStages> v_raw;
  std::uint64_t v_landed[Tile::kValueStages];  // of tiles that have to be cleaned before use
};

template <class Tile>
constexpr int hopper_shared_bytes() {
  static_assert(sizeof(HopperShared<Tile>) <= Tile::kSharedLimit);
  return static_cast<int>(sizeof(HopperShared<Tile>));
}

}  // namespace specdec::attention
