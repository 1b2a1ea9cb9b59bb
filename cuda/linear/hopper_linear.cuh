// out = x weight^T + bias on sm_90a: wgmma with 64 rows of the weight as M and up to 128 rows of x
// as N, so that the weight passes once, whatever the number of rows.
//
// Grid      clusters of blocks with neighbouring columns and the same rows; row tiles of one column
//           tile are neighbours. y: slices of k (stream_cut), whose sums linear.cu adds in order.
// Block     a consumer warpgroup and a loading warp. A ring of stages of 128 k: the block's weights
//           by bulk tensor copies of its own; x by copies that the blocks of the cluster make in
//           turn, each to all of them.
// Shared    [stages][weights: 2 panels of 64 lines][x: 2 panels of kRows lines], lines of 128
//           bytes, 128-byte swizzle; at the end the finished tile, where the ring was.
// Bytes     columns * depth * 2 from memory; x once per cluster, from L2.
// Cost      per stage 8 HGMMA of 64 x kRows x 16: kRows / 2 tensor cycles each; shared memory moves
//           (64 + kRows) lines in and out.
// Limit     memory, at all numbers of rows up to 128 (docs/kernels/linear.md).
//
// Arithmetic: backend/linear_op.h. A row's sums come from its own column of N, over k in an order
// that the matrix's shape fixes: the width of the instruction, tiles and clusters change no bit.
#pragma once

#include <cstdint>

#include "gpu/hopper.cuh"
#include "linear/hopper_linear_tile.h"
#include "linear/linear_launch.cuh"

namespace specdec::cuda {

// One block's place in the call.
template <class Tile>
struct HopperLinearBlock {
  std::int32_t first_row, first_column, first_k, stages;
  unsigned rank, cluster;  // the block's number in its cluster, and how many these are

  __device__ __forceinline__ HopperLinearBlock(const LinearLaunch& launch, unsigned cluster)
      : rank(0), cluster(cluster) {
    if constexpr (Tile::kCluster > 1) rank = gpu::cluster_rank();
    const auto index = static_cast<std::int32_t>(blockIdx.x / cluster);
    const std::int32_t group = index / launch.row_tiles;
    first_row = (index - group * launch.row_tiles) * Tile::kRows;
    first_column = static_cast<std::int32_t>(group * cluster + rank) * Tile::kColumns;
    first_k = static_cast<std::int32_t>(blockIdx.y) * launch.part_depth;
    const std::int32_t left = launch.call.depth - first_k;
    stages = ((left < launch.part_depth ? left : launch.part_depth) - 1) / kStreamDepth + 1;
  }
};

// Weights as they lie in memory. Another source of weights has the same two members: a stage of
// `weights` must hold 64 lines of each panel in T, swizzled, when `full` ends, and `bytes` is what
// the copy engine counts there.
template <class Tile>
struct CopiedWeights {
  static constexpr unsigned kBytes = Tile::kWeightBytes;
  const gpu::TensorMap& map;
  std::uint64_t policy;

  __device__ __forceinline__ void load(unsigned char* weights, std::uint64_t* full, std::int32_t k,
                                       std::int32_t first_column) const {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      gpu::tma_load_2d(weights + panel * Tile::kWeightPanelBytes, map, full,
                       k + panel * Tile::kPanelDepth, first_column, policy);
    }
  }
};

// One thread: fills the ring. What lies outside of the matrices arrives as zeros.
template <class Tile, class Weights>
__device__ __forceinline__ void load_stages(const LinearLaunch& launch,
                                            const HopperLinearBlock<Tile>& block,
                                            const Weights& weights, const gpu::TensorMap& row_map,
                                            HopperLinearShared<Tile>& shared) {
  const auto load_weights = [&](std::int32_t i, int stage) {
    gpu::mbarrier_arrive_expect_tx(&shared.full[stage], Weights::kBytes + Tile::kRowBytes);
    weights.load(shared.weights[stage], &shared.full[stage], block.first_k + i * kStreamDepth,
                 block.first_column);
  };
  // What the kernel before this one wrote is x; the first weights may be on their way before.
  const std::int32_t ahead = block.stages < Tile::kStages ? block.stages : Tile::kStages;
  if (!launch.call.constant_weight) gpu::grid_dependency_wait();
  for (std::int32_t i = 0; i < ahead; ++i) load_weights(i, i);
  if (launch.call.constant_weight) gpu::grid_dependency_wait();

  int stage = 0;
  std::uint32_t round = 0, parities = 0;  // parities: of rows_free, whose phases are this block's
  unsigned turn = 0;                      // the block that brings x of this stage
  for (std::int32_t i = 0; i < block.stages; ++i) {
    if (i >= ahead) {
      gpu::mbarrier_wait(&shared.free[stage], round ^ 1);
      load_weights(i, stage);
    }
    if (turn == block.rank) {
      if (Tile::kCluster > 1 && block.cluster > 1 && i >= Tile::kStages) {
        gpu::mbarrier_wait(&shared.rows_free[stage], parities >> stage & 1);
        parities ^= 1u << stage;
      }
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        unsigned char* to = shared.rows[stage] + panel * Tile::kRowPanelBytes;
        const std::int32_t k = block.first_k + i * kStreamDepth + panel * Tile::kPanelDepth;
        if (Tile::kCluster > 1 && block.cluster > 1) {
          gpu::tma_multicast_2d(to, row_map, &shared.full[stage], k, block.first_row,
                                (1u << block.cluster) - 1);
        } else {
          gpu::tma_load_2d(to, row_map, &shared.full[stage], k, block.first_row);
        }
      }
    }
    if (++turn == block.cluster) turn = 0;
    if (++stage == Tile::kStages) stage = 0, round ^= 1;
  }
}

// The consumer warpgroup: the sums of the block's slice. Element c of fragment j is column
// 16 warp + lane / 4 + 8 (c / 2) and row 8 j + 2 (lane % 4) + c % 2.
template <class T, class Tile>
__device__ __forceinline__ void sum_slice(const HopperLinearBlock<Tile>& block,
                                          HopperLinearShared<Tile>& shared,
                                          float (&total)[Tile::kRows / 2]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float sums[Tile::kRows / 2];
#pragma unroll
  for (int j = 0; j < Tile::kRows / 2; ++j) total[j] = 0.0f;
  int stage = 0;
  std::uint32_t round = 0;
  // The oldest stage that is not released: its place, number, and the block that fills it next.
  int oldest = 0;
  std::int32_t released = 0;
  unsigned filler = static_cast<unsigned>(Tile::kStages) % block.cluster;
  const auto release = [&] {
    __syncwarp();
    if (lane == 0) {
      gpu::mbarrier_arrive(&shared.free[oldest]);
      if (Tile::kCluster > 1 && block.cluster > 1 && released + Tile::kStages < block.stages) {
        gpu::mbarrier_arrive_in(&shared.rows_free[oldest], filler);
      }
    }
    ++released;
    if (++filler == block.cluster) filler = 0;
    if (++oldest == Tile::kStages) oldest = 0;
  };
  for (std::int32_t first = 0; first < block.stages; first += Tile::kChain) {
    const std::int32_t left = block.stages - first;
    const std::int32_t count = left < Tile::kChain ? left : Tile::kChain;
    gpu::wgmma_hold(sums);
    for (std::int32_t i = 0; i < count; ++i) {
      gpu::mbarrier_wait(&shared.full[stage], round);
      gpu::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kStreamDepth / 16; ++step) {
        const int panel = step / 4, at = step % 4 * 32;
        gpu::wgmma_m64k16<T, Tile::kRows>(
            sums,
            gpu::wgmma_descriptor(shared.weights[stage] + panel * Tile::kWeightPanelBytes + at,
                                  gpu::Swizzle::b128, 0, 1024),
            gpu::wgmma_descriptor(shared.rows[stage] + panel * Tile::kRowPanelBytes + at,
                                  gpu::Swizzle::b128, 0, 1024),
            step > 0 || i > 0);
      }
      gpu::wgmma_commit();
      // While these run, the stage before is handed back.
      gpu::wgmma_wait<1>();
      if (i > 0) release();
      if (++stage == Tile::kStages) stage = 0, round ^= 1;
    }
    gpu::wgmma_wait<0>();
    gpu::wgmma_hold(sums);
    release();
#pragma unroll
    for (int j = 0; j < Tile::kRows / 2; ++j) total[j] += sums[j];
  }
}

// The consumer warpgroup: its sums to where they belong, by way of shared memory.
template <class T, class Tile>
__device__ __forceinline__ void store_slice(const LinearLaunch& launch,
                                            const HopperLinearBlock<Tile>& block,
                                            HopperLinearShared<Tile>& shared,
                                            const float (&total)[Tile::kRows / 2]) {
  constexpr int kVectors = Tile::kColumns / kLaneElements;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  float* tile = reinterpret_cast<float*>(shared.weights);
  gpu::named_barrier_sync(1, Tile::kConsumers);  // all have read the ring: the tile takes its place
#pragma unroll
  for (int j = 0; j < Tile::kRows / 2; ++j) {
    const int row = j / 4 * 8 + lane % 4 * 2 + j % 2;
    const int column = thread / 32 * 16 + lane / 4 + j / 2 % 2 * 8;
    tile[row * Tile::kTilePitch + column] = total[j];
  }
  gpu::named_barrier_sync(1, Tile::kConsumers);
  for (int v = thread; v < Tile::kRows * kVectors; v += Tile::kConsumers) {
    const int r = v / kVectors, c = v % kVectors * kLaneElements;
    const std::int32_t row = block.first_row + r, column = block.first_column + c;
    if (row >= launch.call.rows || column >= launch.call.columns) continue;
    float sums[kLaneElements];
    load_floats(tile + r * Tile::kTilePitch + c, true, sums);
    store_sums<T>(launch, static_cast<std::int32_t>(blockIdx.y), row, column, sums);
  }
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    hopper_linear_kernel(const __grid_constant__ LinearLaunch launch, const unsigned cluster,
                         const __grid_constant__ gpu::TensorMap weight_map,
                         const __grid_constant__ gpu::TensorMap row_map) {
  HopperLinearShared<Tile>& shared = *gpu::dynamic_shared<HopperLinearShared<Tile>>();
  const HopperLinearBlock<Tile> block(launch, cluster);
  const auto meet = [&] {
    if (Tile::kCluster > 1 && cluster > 1) {
      gpu::cluster_sync();
    } else {
      __syncthreads();
    }
  };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      gpu::mbarrier_init(&shared.full[stage], 1);
      gpu::mbarrier_init(&shared.free[stage], Tile::kConsumerWarps);
      gpu::mbarrier_init(&shared.rows_free[stage], Tile::kConsumerWarps * cluster);
    }
    gpu::mbarrier_init_fence();
    gpu::prefetch_tensor_map(weight_map);
    gpu::prefetch_tensor_map(row_map);
  }
  meet();
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  if (warp == Tile::kConsumerWarps) {
    gpu::launch_dependents();
    if (gpu::elect_one()) {
      // With one row tile nobody reads a weight again.
      const CopiedWeights<Tile> weights{
          weight_map, launch.row_tiles == 1 ? gpu::l2_evict_first() : gpu::l2_evict_normal()};
      load_stages(launch, block, weights, row_map, shared);
    }
  } else {
    gpu::grid_dependency_wait();
    gpu::launch_dependents();
    float total[Tile::kRows / 2];
    sum_slice<T>(block, shared, total);
    store_slice<T>(launch, block, shared, total);
  }
  // Others may still bring x here, or tell this block's barriers that they have read it.
  __syncwarp();
  if (Tile::kCluster > 1 && cluster > 1) gpu::cluster_sync();
}

// A matrix [rows, depth] of 16-bit elements, in boxes of 64 k by `box_rows`.
inline gpu::TensorMap linear_tensor_map(const void* base, std::int32_t rows, std::int32_t depth,
                                        std::int64_t row_stride, int box_rows) {
  const std::uint64_t dims[] = {static_cast<std::uint64_t>(depth),
                                static_cast<std::uint64_t>(rows)};
  // One row has no stride to speak of.
  const std::int64_t stride = rows > 1 ? row_stride : (depth + 7) / 8 * 8;
  const std::uint64_t strides[] = {static_cast<std::uint64_t>(stride) * 2};
  const std::uint32_t box[] = {64, static_cast<std::uint32_t>(box_rows)};
  return gpu::encode_tensor_map(2, base, 2, dims, strides, box, gpu::Swizzle::b128);
}

template <class T, class Tile>
void launch_hopper_linear(const LinearLaunch& launch, unsigned cluster, dim3 grid) {
  const LinearParams& call = launch.call;
  gpu::launch(hopper_linear_kernel<T, Tile>, grid, dim3(Tile::kThreads),
              sizeof(HopperLinearShared<Tile>), call.exec.stream,
              {.dependent = true, .cluster = cluster}, launch, cluster,
              linear_tensor_map(call.weight, call.columns, call.depth, call.weight_row_stride,
                                Tile::kColumns),
              linear_tensor_map(call.x, call.rows, call.depth, call.x_row_stride, Tile::kRows));
}

}  // namespace specdec::cuda
