// e4m3 V for matrix products of e4m3: wgmma wants the keys of a column side by side, the pages hold
// the columns of a key side by side. Three warps of the loading warpgroup turn each tile that the
// copy engine brings on the way to the consumers. Keys that are not the unit's become zeros.
//
// tile    a line is a column (64 bytes, its 64 keys), 64-byte swizzle. Within each 16 keys, byte
//         4 t + 2 a + b is key 8 a + 2 t + b: that is the order in which a thread of a consumer,
//         lane % 4 == t, holds the weights it computed, so that they need no exchange (a product's
//         sum is over the set of its keys)
// cost    per 64 keys: 4 tasks of 16 keys x 128 columns, a warp each. Per thread and task 16 loads
//         of 4 bytes (a warp reads a line), 48 PRMT, 4 stores of 16 bytes. No bank conflicts: the
//         lanes store their 4 columns in an order that spreads 8 lanes over all chunks of a line
#pragma once

#include <cstdint>

#include "attention/hopper_load.cuh"
#include "attention/hopper_tile.h"

namespace specdec::attention::hopper {

inline constexpr int kGroupKeys = 16;

// 16 keys of a tile, 4 columns of each thread of a warp. first_key: of the group.
template <class Tile>
__device__ __forceinline__ void transpose_keys(const unsigned char* raw, unsigned char* tile,
                                               int group, bool partial, const UnitKeys& keys,
                                               std::int32_t first_key) {
  static_assert(Tile::kDim == 4 * 32, "a lane has 4 columns");
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto* words = reinterpret_cast<const std::uint32_t*>(raw) + lane;
  std::uint32_t in[kGroupKeys];
#pragma unroll
  for (int i = 0; i < kGroupKeys; ++i) {
    const int key = 8 * (i / 2 % 2) + 2 * (i / 4) + i % 2;
    in[i] = words[(group * kGroupKeys + key) * (Tile::kDim / 4)];
    if (partial && !keys.has(first_key + key)) in[i] = 0;
  }
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int byte = (step + lane / 2) % 4;
    const std::uint32_t select = static_cast<std::uint32_t>(byte * 0x11 + 0x40);
    std::uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = __byte_perm(__byte_perm(in[4 * i], in[4 * i + 1], select),
                           __byte_perm(in[4 * i + 2], in[4 * i + 3], select), 0x5410);
    }
    const int column = 4 * lane + byte;
    reinterpret_cast<uint4*>(tile)[column * 4 + (group ^ (column / 2 % 4))] =
        make_uint4(out[0], out[1], out[2], out[3]);
  }
}

// The transposing warps: raw tiles of V to tiles, for all units of the block, in order.
template <class Tile>
__device__ __forceinline__ void transpose_tiles(const AttentionLaunch& launch,
                                                HopperShared<Tile>& shared) {
  constexpr int kGroups = kBlockKeys / kGroupKeys;
  const WorkView& work = launch.work;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32) - 1;
  int turn = 0;  // groups go to the warps in turn, from tile to tile
  Cursor<Tile::kLoadStages> from;
  Cursor<Tile::kValueStages> to;
  for (std::int32_t u = work.block_begin[blockIdx.x]; u < work.block_begin[blockIdx.x + 1]; ++u) {
    const Unit unit = work.units[u];
    const UnitKeys keys(work.jobs[unit.job], unit);
    for (std::int32_t block = keys.first_block(); block < keys.end_block(); ++block) {
      gpu::mbarrier_wait(&shared.v_raw.full[from.stage], from.round);
      gpu::mbarrier_wait(&shared.v_ready.empty[to.stage], to.round ^ 1);
      for (int group = 0; group < kGroups; ++group) {
        if (turn == warp) {
          transpose_keys<Tile>(shared.raw_v[from.stage], shared.v[to.stage], group,
                               keys.is_partial(block), keys,
                               block * kBlockKeys + group * kGroupKeys);
        }
        if (++turn == kTurningWarps<Tile>) turn = 0;
      }
      gpu::fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        gpu::mbarrier_arrive(&shared.v_ready.full[to.stage]);
        gpu::mbarrier_arrive(&shared.v_raw.empty[from.stage]);
      }
      from.advance();
      to.advance();
    }
  }
}

}  // namespace specdec::attention::hopper
