// out = x weight^T times the rows' scales + bias on sm_90a, both operands e4m3: the packed weight's
// tiles (backend/packed_weight.h) are wgmma's A, as they lie, and x its B, as round_rows() wrote
// it.
//
// Grid, block  as in hopper_packed.cuh.
// Shared       [stages][weights: packed tiles, (32 columns, 64 k)][x: lines of 128 bytes and k,
//              128-byte swizzle]; at the end the finished tile.
// Bytes        the packed weight's from memory; x, a byte an element, once per block from L2.
// Cost         per 64 k and warpgroup 2 QGMMA of 64 x kRows x 32, then kRows / 2 multiply-adds a
//              lane for the columns' scales.
// Limit        memory; of many rows what L2 delivers of x.
//
// Arithmetic: backend/linear_op.h. The tensor cores add e4m3 products with few bits (about 14), so
// no sum of theirs is longer than 64 k.
#pragma once

#include <cstdint>

#include "backend/linear_pick.h"
#include "linear/e4m3_rows.h"
#include "linear/hopper_packed.cuh"

namespace specdec::cuda {

// A lane's part of a tile for the 16 columns of its warp: the operands of its two times 32 k, and
// the scales of its two columns. The 16 bytes of a lane for 32 k are 2 k of one column and 2 of
// the other, four times; an operand's register takes those of one column. Which k these are,
// round_rows() knows.
struct E4m3Weights {
  std::uint32_t a[2][4];
  float scales[2];

  __device__ __forceinline__ void load(const unsigned char* tile, int fragment, int lane,
                                       bool exists) {
    constexpr PackedLayout kLayout = packed_layout(WeightFormat::kF8_A8);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 numbers =
          exists ? reinterpret_cast<const uint4*>(tile)[(fragment * 2 + half) * 32 + lane]
                 : make_uint4(0, 0, 0, 0);
      a[half][0] = __byte_perm(numbers.x, numbers.y, 0x5410u);
      a[half][1] = __byte_perm(numbers.x, numbers.y, 0x7632u);
      a[half][2] = __byte_perm(numbers.z, numbers.w, 0x5410u);
      a[half][3] = __byte_perm(numbers.z, numbers.w, 0x7632u);
    }
    scales[0] = scales[1] = 0.0f;
    if (exists) {
      load_floats(reinterpret_cast<const float*>(tile + kLayout.number_bytes()) + lane / 4 * 4 +
                      fragment * 2,
                  true, scales);
    }
  }
};

// A consumer warpgroup: its columns' sums of the block's slice, placed as by sum_slice().
template <class Tile>
__device__ __forceinline__ void sum_e4m3_slice(const LinearLaunch& launch,
                                               const HopperLinearBlock<Tile>& block,
                                               HopperLinearShared<Tile>& shared,
                                               float (&total)[Tile::kRows / 2]) {
  const WarpTiles<WeightFormat::kF8_A8, Tile> tiles(launch, block);
  float part[Tile::kRows / 2];
#pragma unroll
  for (int j = 0; j < Tile::kRows / 2; ++j) total[j] = 0.0f;
  int stage = 0;
  std::uint32_t round = 0;
  for (std::int32_t i = 0; i < block.stages; ++i) {
    gpu::mbarrier_wait(&shared.full[stage], round);
    const std::uint64_t rows =
        gpu::wgmma_descriptor(shared.rows[stage], gpu::Swizzle::b128, 0, 1024);
    E4m3Weights weights[Tile::kPanels];
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      weights[panel].load(tiles.at(shared.weights[stage], panel), tiles.fragment, tiles.lane,
                          i * Tile::kPanels + panel < tiles.count);
    }
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      std::uint32_t (&a)[2][4] = weights[panel].a;
      gpu::wgmma_hold(part);
      gpu::wgmma_hold(a[0]);
      gpu::wgmma_hold(a[1]);
      gpu::wgmma_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        gpu::wgmma_rs_m64k32_e4m3<Tile::kRows>(
            part, a[half], gpu::wgmma_behind(rows, panel * 64 + half * 32), half > 0);
      }
      gpu::wgmma_commit();
      gpu::wgmma_wait<0>();
      gpu::wgmma_hold(part);
#pragma unroll
      for (int j = 0; j < Tile::kRows / 2; ++j) {
        total[j] = fmaf(part[j], weights[panel].scales[j / 2 % 2], total[j]);
      }
    }
    __syncwarp();
    if (tiles.lane == 0) gpu::mbarrier_arrive(&shared.free[stage]);
    if (++stage == Tile::kStages) stage = 0, round ^= 1;
  }
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    hopper_e4m3_kernel(const __grid_constant__ LinearLaunch launch,
                       const __grid_constant__ gpu::TensorMap row_map) {
  HopperLinearShared<Tile>& shared = *gpu::dynamic_shared<HopperLinearShared<Tile>>();
  const HopperLinearBlock<Tile> block(launch);
  const CopiedTiles<WeightFormat::kF8_A8, Tile> weights{launch.call, weight_policy(launch)};
  run_block<T>(launch, block, weights, row_map, shared, [&](float (&total)[Tile::kRows / 2]) {
    sum_e4m3_slice(launch, block, shared, total);
  });
}

template <class T, class Tile>
void launch_e4m3_tile(const LinearLaunch& launch, dim3 grid) {
  static_assert(sizeof(HopperLinearShared<Tile>) <= kPackedSharedBytes);
  const LinearParams& call = launch.call;
  gpu::launch(hopper_e4m3_kernel<T, Tile>, grid, dim3(Tile::kThreads),
              sizeof(HopperLinearShared<Tile>), call.exec.stream, {.dependent = true}, launch,
              linear_tensor_map(call.x, call.rows, e4m3_pitch(call.depth), call.x_row_stride,
                                rows_of_block(launch), 1));
}

template <class T>
void launch_hopper_e4m3(const LinearLaunch& launch, StreamTile tile, dim3 grid) {
  by_packed_tile(tile, [&]<int kRows, int kGroups>() {
    launch_e4m3_tile<T, HopperE4m3Tile<kRows, kGroups>>(launch, grid);
  });
}

}  // namespace specdec::cuda
