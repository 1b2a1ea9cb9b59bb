// Sizes of the Ampere family: tiles, stages, and the map of a block's shared memory.
//
//   q       [kRowTile][K] T           the job's queries
//   k, v    [stages][64][K] T         keys and values. e4m3 pages: one tile each, or one for
//                                     both in turn, of what a raw stage is widened to
//   raw     [stages][2][64][K] e4m3   only for e4m3 pages; a thread widens what it has copied
//   groups  [kGroups] int64           where each 16 keys lie in the pool
//
// Rows of q, k and v are 16-byte chunks, permuted by swizzle() so that the eight rows which one
// ldmatrix reads lie in eight different groups of banks.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backend/attention/arithmetic.h"
#include "gpu/gpu.cuh"

namespace specdec::attention {

// T: type of q, out and the matrix operands. Kv: of the pages, T or __nv_fp8_e4m3.
template <class T_, class Kv_, int kHeadDim_, int kRowTile_>
struct AmpereConfig {
  using T = T_;
  using Kv = Kv_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowTile = kRowTile_;
  static constexpr int kKeys = kBlockKeys;
  static constexpr int kWarps = kRowTile / 16;
  static constexpr int kThreads = kWarps * 32;
  static constexpr bool kWiden = !std::is_same_v<T, Kv>;
  static_assert(sizeof(T) == 2 && kRowTile % 16 == 0 && kHeadDim % 16 == 0);

  // A head dim of 256 has no registers left for a second accumulator: the running total of a unit
  // then stays in its state slot (L2), touched once per chunk.
  static constexpr bool kTotalInRegisters = kHeadDim <= 128;
  static constexpr int kBlocksPerSm = kThreads == 32 ? 3 : kThreads == 128 ? 2 : 1;

  // Stages in flight. 256 wide, one stage of K and V is already 64 KB: K and V then overlap by
  // turns, either loads while the other is used.
  static constexpr int kStages = kHeadDim > 128 ? 1 : kHeadDim > 64 ? 2 : 3;
  // Copies whose addresses are worked out together: what registers are left for.
  static constexpr int kCopyUnroll =
      kHeadDim > 128 || kHeadDim % 64 != 0 || (kWiden && kHeadDim == 128) ? 1 : 4;
  static constexpr bool kOneOperand = kWiden && kHeadDim > 128;

  static constexpr int kRowChunks = kHeadDim / 8;  // 16-byte chunks of a row of T
  static constexpr int kRowBytes = kRowChunks * 16;
  static constexpr int kTileBytes = kKeys * kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kRawBytes = kKeys * kHeadDim;
  static constexpr int kBuffers = kWiden ? 1 : kStages;  // of k, and of v

  // Groups of 16 keys whose place is looked up at a time: a page holds at least one.
  static constexpr int kGroupKeys = 16;
  static constexpr int kGroups = 128;
  static constexpr int kWindowBlocks = kGroups * kGroupKeys / kKeys;

  static constexpr int kQueryOffset = 0;
  static constexpr int kKeyOffset = kRowTile * kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kValueOffset = kKeyOffset + (kOneOperand ? 0 : kBuffers * kTileBytes);
  static constexpr int kRawOffset = kValueOffset + kBuffers * kTileBytes;
  static constexpr int kGroupOffset = kRawOffset + (kWiden ? kStages * 2 * kRawBytes : 0);
  static constexpr int kSmemBytes = kGroupOffset + kGroups * 8;

  // The place of chunk `chunk` of row `row`, in bytes from the first row. A row is a whole number
  // of kFold chunks, so that the permutation stays inside it.
  static constexpr int kLowBit = kRowChunks & -kRowChunks;
  static constexpr int kFold = kLowBit < 8 ? kLowBit : 8;
  __device__ static __forceinline__ int permutation(int row) {
    return row / (8 / kFold) & (kFold - 1);
  }
  __device__ static __forceinline__ int swizzle(int row, int chunk) {
    return row * kRowBytes + (chunk ^ permutation(row)) * 16;
  }
};

}  // namespace specdec::attention
