// out = x weight^T + bias on sm_90a with a weight in 8 or 4 bits (backend/packed_weight.h): the
// stream kernel (hopper_linear.cuh) whose weights become wgmma's A in the registers of its warps.
//
// Grid, block  as there. Of two packed tiles of 32 columns of a warpgroup each warp has half of
// one,
//              16 columns, which are the 16 rows of A that it gives.
// Shared       [stages][weights: packed tiles, (32 columns, 64 k)][x: panels of kRows lines of 128
//              bytes, 128-byte swizzle]; at the end the finished tile.
// Bytes        the packed weight's from memory; x once per block, from L2.
// Cost         per half panel of 32 k and warp 16 numbers a lane are widened while the tensor cores
//              have the half before: 2 HGMMA of 64 x kRows x 16.
// Limit        issue slots of the widening for few rows; what L2 delivers of x for many.
//
// Arithmetic: backend/linear_op.h, that of the stream kernel with the weight's elements rounded
// to T.
#pragma once

#include <cstdint>

#include "backend/linear_pick.h"
#include "linear/hopper_linear.cuh"
#include "linear/packed_weights.cuh"

namespace specdec::cuda {

// Tiles as they lie in memory, those of one 32 columns side by side. Tiles that do not exist are
// neither copied nor counted.
template <WeightFormat kFormat, class Tile>
struct CopiedTiles {
  static constexpr PackedLayout kLayout = packed_layout(kFormat);
  static constexpr int kStrips = Tile::kColumns / PackedLayout::kColumns;
  const LinearParams& call;
  std::uint64_t policy;

  // What a stage has of one 32 columns, from k on.
  __device__ __forceinline__ unsigned strip_bytes(std::int32_t k) const {
    const std::int32_t left = (call.depth - k - 1) / PackedLayout::kDepth + 1;
    return static_cast<unsigned>((left < Tile::kPanels ? left : Tile::kPanels) *
                                 kLayout.tile_bytes());
  }
  __device__ __forceinline__ unsigned bytes(std::int32_t k, std::int32_t first_column) const {
    const std::int32_t left = (call.columns - first_column - 1) / PackedLayout::kColumns + 1;
    return strip_bytes(k) * static_cast<unsigned>(left < kStrips ? left : kStrips);
  }
  __device__ __forceinline__ void load(unsigned char* weights, std::uint64_t* full, std::int32_t k,
                                       std::int32_t first_column) const {
    const std::int64_t depth_tiles = PackedLayout::depth_tiles(call.depth);
    const unsigned char* from =
        static_cast<const unsigned char*>(call.weight) +
        (first_column / PackedLayout::kColumns * depth_tiles + k / PackedLayout::kDepth) *
            kLayout.tile_bytes();
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      if (first_column + strip * PackedLayout::kColumns >= call.columns) break;
      gpu::bulk_load(weights + strip * Tile::kPanels * kLayout.tile_bytes(),
                     from + strip * depth_tiles * kLayout.tile_bytes(), strip_bytes(k), full,
                     policy);
    }
  }
};

// A lane's part of a packed tile, for the 16 columns of its warp; of one half at a time.
template <class T, WeightFormat kFormat>
struct PanelWeights {
  static constexpr PackedLayout kLayout = packed_layout(kFormat);
  static constexpr int kVectors = kLayout.bits / 4;     // of a fragment's columns
  static constexpr int kSteps = 4 / kVectors;           // of 16 k in a vector
  static constexpr int kWords = kLayout.bits * 8 / 32;  // of a lane's 8 numbers of a step
  using Factor = std::conditional_t<kLayout.is_wide, float, __half>;
  std::uint32_t numbers[4];
  float scales[2], minimums[2] = {};  // of one group of k

  // The operands of 32 k, half `half` of the tile's. Halves ascending: what both need is read once.
  __device__ __forceinline__ void widen(const unsigned char* tile, int fragment, int lane, int half,
                                        std::uint32_t (&a)[2][4]) {
    if (half == 0 || kVectors == 2) {
      const uint4 vector = reinterpret_cast<const uint4*>(
          tile)[(fragment * kVectors + half * (kVectors - 1)) * 32 + lane];
      numbers[0] = vector.x, numbers[1] = vector.y, numbers[2] = vector.z, numbers[3] = vector.w;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = half * 2 + i;
      if (step % (kLayout.group / 16) == 0) {
        // A lane has 4 columns of the tile, 8 apart; two are the fragment's.
        const Factor* from = reinterpret_cast<const Factor*>(tile + kLayout.number_bytes()) +
                             step * 16 / kLayout.group * PackedLayout::kColumns + lane / 4 * 4 +
                             fragment * 2;
        load_floats(from, true, scales);
        if constexpr (kLayout.has_minimum) {
          load_floats(from + kLayout.scale_bytes() / static_cast<int>(sizeof(Factor)), true,
                      minimums);
        }
      }
      widen_fragment<T, kFormat>(numbers + step % kSteps * kWords,
                                 {WeightFactors<kFormat>(scales[0], minimums[0]),
                                  WeightFactors<kFormat>(scales[1], minimums[1])},
                                 a[i]);
    }
  }
};

// Which packed tiles of a stage are a consumer warp's: half of those of 32 columns.
template <WeightFormat kFormat, class Tile>
struct WarpTiles {
  static constexpr int kTileBytes = packed_layout(kFormat).tile_bytes();
  int lane, strip, fragment;
  std::int32_t count;  // that exist, from the slice's first k on

  __device__ __forceinline__ WarpTiles(const LinearLaunch& launch,
                                       const HopperLinearBlock<Tile>& block)
      : lane(static_cast<int>(threadIdx.x % 32)) {
    const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
    strip = warp / 2, fragment = warp % 2;
    count = block.first_column + strip * PackedLayout::kColumns < launch.call.columns
                ? (launch.call.depth - block.first_k - 1) / PackedLayout::kDepth + 1
                : 0;
  }
  __device__ __forceinline__ const unsigned char* at(const unsigned char* weights,
                                                     int panel) const {
    return weights + (strip * Tile::kPanels + panel) * kTileBytes;
  }
};

// A consumer warpgroup: its columns' sums of the block's slice, placed as by sum_slice().
template <class T, WeightFormat kFormat, class Tile>
__device__ __forceinline__ void sum_packed_slice(const LinearLaunch& launch,
                                                 const HopperLinearBlock<Tile>& block,
                                                 HopperLinearShared<Tile>& shared,
                                                 float (&total)[Tile::kRows / 2]) {
  const WarpTiles<kFormat, Tile> tiles(launch, block);
  PanelWeights<T, kFormat> weights;
  std::uint32_t a[2][2][4];  // of the two halves of a panel
  const auto multiply = [&](int stage, std::int32_t index, bool begins,
                            float (&sums)[Tile::kRows / 2], const auto& release) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const bool exists = index * Tile::kPanels + panel < tiles.count;
      const unsigned char* tile = tiles.at(shared.weights[stage], panel);
      const std::uint64_t rows = gpu::wgmma_descriptor(
          shared.rows[stage] + panel * Tile::kRowPanelBytes, gpu::Swizzle::b128, 0, 1024);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Without a branch ptxas takes this for a part of what is in flight, and serialises.
        if (exists) {
          weights.widen(tile, tiles.fragment, tiles.lane, half, a[half]);
        } else {
#pragma unroll
          for (int r = 0; r < 8; ++r) a[half][r / 4][r % 4] = 0;
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) gpu::wgmma_hold(a[half][step]);
        gpu::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          gpu::wgmma_rs_m64k16<T, Tile::kRows>(sums, a[half][step],
                                               gpu::wgmma_behind(rows, (half * 2 + step) * 32),
                                               panel > 0 || half > 0 || step > 0 || !begins);
        }
        gpu::wgmma_commit();
        // While these run, the other half's registers are free to be widened into.
        gpu::wgmma_wait<1>();
#pragma unroll
        for (int step = 0; step < 2; ++step) gpu::wgmma_hold(a[1 - half][step]);
        if (panel == 0 && half == 0 && !begins) release();
      }
    }
  };
  sum_chains(block, shared, total, multiply);
}

template <class T, WeightFormat kFormat, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    hopper_packed_kernel(const __grid_constant__ LinearLaunch launch,
                         const __grid_constant__ gpu::TensorMap row_map) {
  HopperLinearShared<Tile>& shared = *gpu::dynamic_shared<HopperLinearShared<Tile>>();
  const HopperLinearBlock<Tile> block(launch);
  const CopiedTiles<kFormat, Tile> weights{launch.call, weight_policy(launch)};
  run_block<T>(launch, block, weights, row_map, shared, [&](float (&total)[Tile::kRows / 2]) {
    sum_packed_slice<T, kFormat>(launch, block, shared, total);
  });
}

template <class T, WeightFormat kFormat, class Tile>
void launch_packed_tile(const LinearLaunch& launch, dim3 grid) {
  static_assert(sizeof(HopperLinearShared<Tile>) <= kPackedSharedBytes);
  gpu::launch(hopper_packed_kernel<T, kFormat, Tile>, grid, dim3(Tile::kThreads),
              sizeof(HopperLinearShared<Tile>), launch.call.exec.stream, {.dependent = true},
              launch, linear_row_map(launch));
}

// Calls start<rows, warpgroups>() for the tile, which is `kAt` of kPackedTiles or one behind it.
template <std::size_t kAt = 0, class F>
void by_packed_tile(StreamTile tile, F start) {
  constexpr StreamTile kTile = kPackedTiles[kAt];
  if constexpr (kAt + 1 < kPackedTiles.size()) {
    if (tile.row_tile != kTile.row_tile || tile.columns != kTile.columns) {
      return by_packed_tile<kAt + 1>(tile, start);
    }
  }
  start.template operator()<kTile.row_tile, kTile.columns / kStreamColumns>();
}

template <class T, WeightFormat kFormat>
void launch_hopper_packed(const LinearLaunch& launch, StreamTile tile, dim3 grid) {
  by_packed_tile(tile, [&]<int kRows, int kGroups>() {
    launch_packed_tile<T, kFormat, HopperPackedTile<kFormat, kRows, kGroups>>(launch, grid);
  });
}

}  // namespace specdec::cuda
