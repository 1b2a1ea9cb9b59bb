// out = x weight^T + bias on sm_90a: wgmma with 64 rows of the weight as M and up to 128 rows of x
// as N, so that the weight passes once, whatever the number of rows.
//
// Grid      row tiles of one column tile are neighbours. y: slices of k (stream_cut), whose sums
//           linear.cu adds in order.
// Block     one, two or four consumer warpgroups, each with 64 columns, and two loading warps,
//           which fill a ring of stages of 64 or 128 k by bulk tensor copies. One brings weights,
//           if they are constant before the previous kernel has ended, the other x. Small blocks
//           are two to a multiprocessor, so that one streams while the other begins or ends.
// Shared    [stages][weights: panels of kColumns lines][x: panels of kRows lines], lines of 128
//           bytes, 128-byte swizzle; at the end the finished tile, where the ring was.
// Bytes     columns * depth * 2 from memory; x once per block, from L2.
// Cost      per panel of 64 k and group 4 HGMMA of 64 x kRows x 16: kRows / 2 tensor cycles each;
//           shared memory moves (kColumns + kRows) lines in and out.
// Limit     memory up to 64 rows; above, what L2 delivers of weights and x. Measured:
//           docs/kernels/linear.md.
//
// Arithmetic: backend/linear_op.h. A row's sums come from its own column of N, over k in an order
// that the matrix's shape fixes: the width of the instruction and tiles change no bit.
#pragma once

#include <cstdint>

#include "gpu/hopper.cuh"
#include "linear/hopper_linear_tile.h"
#include "linear/linear_launch.cuh"

namespace specdec::cuda {

// Rows of x that a block has, at most kRows. The copy engine brings no more than these: rows
// outside of the matrix, which it would fill with zeros, cost it several times what rows in it do.
__host__ __device__ __forceinline__ std::int32_t rows_of_block(const LinearLaunch& launch) {
  return (launch.call.rows - 1) / launch.row_tiles + 1;
}

// One block's place in the call.
template <class Tile>
struct HopperLinearBlock {
  std::int32_t first_row, first_column, first_k, stages, rows;

  __device__ __forceinline__ explicit HopperLinearBlock(const LinearLaunch& launch)
      : rows(rows_of_block(launch)) {
    const auto index = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t column_tile = index / launch.row_tiles;
    first_row = (index - column_tile * launch.row_tiles) * rows;
    first_column = column_tile * Tile::kColumns;
    first_k = static_cast<std::int32_t>(blockIdx.y) * launch.part_depth;
    const std::int32_t left = launch.call.depth - first_k;
    stages = ((left < launch.part_depth ? left : launch.part_depth) - 1) / Tile::kDepth + 1;
  }
};

// Weights as they lie in memory: a stage of `weights` holds kColumns lines of each panel in T,
// swizzled, when `full` ends. Another source (hopper_packed.cuh) has the same two members; bytes()
// is what the copy engine counts.
template <class Tile>
struct CopiedWeights {
  const gpu::TensorMap& map;
  std::uint64_t policy;

  __device__ __forceinline__ unsigned bytes(std::int32_t, std::int32_t) const {
    return Tile::kWeightBytes;
  }
  __device__ __forceinline__ void load(unsigned char* weights, std::uint64_t* full, std::int32_t k,
                                       std::int32_t first_column) const {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      gpu::tma_load_2d(weights + panel * Tile::kWeightPanelBytes, map, full,
                       k + panel * Tile::kPanelDepth, first_column, policy);
    }
  }
};

// One thread: brings the ring's weights. What lies outside of the matrix arrives as zeros.
template <class Tile, class Weights>
__device__ __forceinline__ void load_weights(const LinearLaunch& launch,
                                             const HopperLinearBlock<Tile>& block,
                                             const Weights& weights,
                                             HopperLinearShared<Tile>& shared) {
  // What the kernel before this one wrote is x; weights may be on their way before.
  if (!launch.call.constant_weight) gpu::grid_dependency_wait();
  int stage = 0;
  std::uint32_t round = 0;
  for (std::int32_t i = 0; i < block.stages; ++i) {
    const std::int32_t k = block.first_k + i * Tile::kDepth;
    if (i >= Tile::kStages) gpu::mbarrier_wait(&shared.free[stage], round ^ 1);
    gpu::mbarrier_arrive_expect_tx(
        &shared.full[stage], weights.bytes(k, block.first_column) +
                                 static_cast<unsigned>(block.rows) * (Tile::kRowPanels * 128));
    weights.load(shared.weights[stage], &shared.full[stage], k, block.first_column);
    if (++stage == Tile::kStages) stage = 0, round ^= 1;
  }
}

// The consumers: zeroes the rows of the ring that no copy fills.
template <class Tile>
__device__ __forceinline__ void clear_rows(const HopperLinearBlock<Tile>& block,
                                           HopperLinearShared<Tile>& shared) {
  constexpr int kVectors = Tile::kRowPanelBytes / 16;
  const int first = block.rows * 8;  // 16 bytes each, 8 to a line
  if (first == kVectors) return;
  for (int panel = 0; panel < Tile::kStages * Tile::kRowPanels; ++panel) {
    uint4* lines = reinterpret_cast<uint4*>(shared.rows[0] + panel * Tile::kRowPanelBytes);
    for (int i = first + static_cast<int>(threadIdx.x); i < kVectors; i += Tile::kConsumers) {
      lines[i] = make_uint4(0, 0, 0, 0);
    }
  }
  gpu::fence_proxy_async();
  gpu::named_barrier_sync(1, Tile::kConsumers);
}

// One thread: brings the ring's x.
template <class Tile>
__device__ __forceinline__ void load_rows(const HopperLinearBlock<Tile>& block,
                                          const gpu::TensorMap& row_map,
                                          HopperLinearShared<Tile>& shared) {
  gpu::grid_dependency_wait();
  int stage = 0;
  std::uint32_t round = 0;
  for (std::int32_t i = 0; i < block.stages; ++i) {
    if (i >= Tile::kStages) gpu::mbarrier_wait(&shared.free[stage], round ^ 1);
#pragma unroll
    for (int panel = 0; panel < Tile::kRowPanels; ++panel) {
      gpu::tma_load_2d(
          shared.rows[stage] + panel * Tile::kRowPanelBytes, row_map, &shared.full[stage],
          block.first_k + i * Tile::kDepth + panel * Tile::kLineDepth, block.first_row);
    }
    if (++stage == Tile::kStages) stage = 0, round ^= 1;
  }
}

// A consumer warpgroup walks the block's slice, chain after chain. multiply(stage, first, sums,
// release) adds a stage of the ring, `first` of its chain or not, to sums, and calls release() when
// no product of the stage before is unfinished.
template <class Tile, class Multiply>
__device__ __forceinline__ void sum_chains(const HopperLinearBlock<Tile>& block,
                                           HopperLinearShared<Tile>& shared,
                                           float (&total)[Tile::kRows / 2], Multiply&& multiply) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float sums[Tile::kRows / 2];
#pragma unroll
  for (int j = 0; j < Tile::kRows / 2; ++j) total[j] = 0.0f;
  int stage = 0, oldest = 0;  // oldest: that is not released
  std::uint32_t round = 0;
  const auto release = [&] {
    __syncwarp();
    if (lane == 0) gpu::mbarrier_arrive(&shared.free[oldest]);
    if (++oldest == Tile::kStages) oldest = 0;
  };
  for (std::int32_t first = 0; first < block.stages; first += Tile::kChain) {
    const std::int32_t left = block.stages - first;
    const std::int32_t count = left < Tile::kChain ? left : Tile::kChain;
    gpu::wgmma_hold(sums);
    for (std::int32_t i = 0; i < count; ++i) {
      gpu::mbarrier_wait(&shared.full[stage], round);
      multiply(stage, first + i, i == 0, sums, release);
      if (++stage == Tile::kStages) stage = 0, round ^= 1;
    }
    gpu::wgmma_wait<0>();
    gpu::wgmma_hold(sums);
    release();
#pragma unroll
    for (int j = 0; j < Tile::kRows / 2; ++j) total[j] += sums[j];
  }
}

// A consumer warpgroup: its columns' sums of the block's slice. Element c of fragment j is column
// 16 warp + lane / 4 + 8 (c / 2) of the block and row 8 j + 2 (lane % 4) + c % 2.
template <class T, class Tile>
__device__ __forceinline__ void sum_slice(const HopperLinearBlock<Tile>& block,
                                          HopperLinearShared<Tile>& shared,
                                          float (&total)[Tile::kRows / 2]) {
  // The same for all lanes, which the compiler cannot know of a thread's number.
  const int group = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 128), 0);
  const int group_lines = group * Tile::kGroupColumns * 128;
  const auto multiply = [&](int stage, std::int32_t, bool begins, float (&sums)[Tile::kRows / 2],
                            const auto& release) {
    gpu::wgmma_fence();
    const std::uint64_t weights =
        gpu::wgmma_descriptor(shared.weights[stage] + group_lines, gpu::Swizzle::b128, 0, 1024);
    const std::uint64_t rows =
        gpu::wgmma_descriptor(shared.rows[stage], gpu::Swizzle::b128, 0, 1024);
#pragma unroll
    for (int step = 0; step < Tile::kDepth / 16; ++step) {
      const int panel = step / 4, at = step % 4 * 32;
      gpu::wgmma_m64k16<T, Tile::kRows>(
          sums, gpu::wgmma_behind(weights, panel * Tile::kWeightPanelBytes + at),
          gpu::wgmma_behind(rows, panel * Tile::kRowPanelBytes + at), step > 0 || !begins);
    }
    gpu::wgmma_commit();
    // While these run, the stage before is handed back.
    gpu::wgmma_wait<1>();
    if (!begins) release();
  };
  sum_chains(block, shared, total, multiply);
}

// The consumer warpgroups: their sums to where they belong, by way of shared memory.
template <class T, class Tile>
__device__ __forceinline__ void store_slice(const LinearLaunch& launch,
                                            const HopperLinearBlock<Tile>& block,
                                            HopperLinearShared<Tile>& shared,
                                            const float (&total)[Tile::kRows / 2]) {
  constexpr int kVectors = Tile::kColumns / kLaneElements;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  float* tile = reinterpret_cast<float*>(&shared);
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
    if (r >= block.rows || row >= launch.call.rows || column >= launch.call.columns) continue;
    float sums[kLaneElements];
    load_floats(tile + r * Tile::kTilePitch + c, true, sums);
    store_sums<T>(launch, static_cast<std::int32_t>(blockIdx.y), row, column, sums);
  }
}

// All threads: the ring's barriers are ready.
template <class Tile>
__device__ __forceinline__ void begin_ring(HopperLinearShared<Tile>& shared,
                                           const gpu::TensorMap& row_map) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      gpu::mbarrier_init(&shared.full[stage], 1);
      gpu::mbarrier_init(&shared.free[stage], Tile::kConsumerWarps);
    }
    gpu::mbarrier_init_fence();
    gpu::prefetch_tensor_map(row_map);
  }
  __syncthreads();
}

// What the warps of a block do; sum(total) makes a consumer warpgroup's sums.
template <class T, class Tile, class Weights, class Sum>
__device__ __forceinline__ void run_block(const LinearLaunch& launch,
                                          const HopperLinearBlock<Tile>& block,
                                          const Weights& weights, const gpu::TensorMap& row_map,
                                          HopperLinearShared<Tile>& shared, Sum&& sum) {
  begin_ring(shared, row_map);
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  if (warp >= Tile::kConsumerWarps) {
    if constexpr (Tile::kHandsOver) gpu::setmaxnreg_dec<Tile::kLoaderRegisters>();
    gpu::launch_dependents();
    if (warp == Tile::kConsumerWarps) {
      if (gpu::elect_one()) load_weights(launch, block, weights, shared);
    } else if (warp == Tile::kConsumerWarps + 1) {
      if (gpu::elect_one()) load_rows(block, row_map, shared);
    }
  } else {
    if constexpr (Tile::kHandsOver) gpu::setmaxnreg_inc<Tile::kConsumerRegisters>();
    clear_rows(block, shared);
    gpu::grid_dependency_wait();
    gpu::launch_dependents();
    float total[Tile::kRows / 2];
    sum(total);
    store_slice<T>(launch, block, shared, total);
  }
}

// With one row tile nobody reads a weight again.
__device__ __forceinline__ std::uint64_t weight_policy(const LinearLaunch& launch) {
  return launch.row_tiles == 1 ? gpu::l2_evict_first() : gpu::l2_evict_normal();
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    hopper_linear_kernel(const __grid_constant__ LinearLaunch launch,
                         const __grid_constant__ gpu::TensorMap weight_map,
                         const __grid_constant__ gpu::TensorMap row_map) {
  HopperLinearShared<Tile>& shared = *gpu::dynamic_shared<HopperLinearShared<Tile>>();
  const HopperLinearBlock<Tile> block(launch);
  if (threadIdx.x == 0) gpu::prefetch_tensor_map(weight_map);
  const CopiedWeights<Tile> weights{weight_map, weight_policy(launch)};
  run_block<T>(launch, block, weights, row_map, shared,
               [&](float (&total)[Tile::kRows / 2]) { sum_slice<T>(block, shared, total); });
}

// A matrix [rows, depth] of elements of 2 bytes, or 1, in boxes of 128 bytes of k by `box_rows`.
inline gpu::TensorMap linear_tensor_map(const void* base, std::int32_t rows, std::int32_t depth,
                                        std::int64_t row_stride, int box_rows,
                                        int element_bytes = 2) {
  const std::uint64_t dims[] = {static_cast<std::uint64_t>(depth),
                                static_cast<std::uint64_t>(rows)};
  // One row has no stride to speak of.
  const std::int64_t stride = rows > 1 ? row_stride : (depth + 7) / 8 * 8;
  const std::uint64_t strides[] = {static_cast<std::uint64_t>(stride) *
                                   static_cast<std::uint64_t>(element_bytes)};
  const std::uint32_t box[] = {128u / static_cast<unsigned>(element_bytes),
                               static_cast<std::uint32_t>(box_rows)};
  return gpu::encode_tensor_map(element_bytes, base, 2, dims, strides, box, gpu::Swizzle::b128);
}

inline gpu::TensorMap linear_row_map(const LinearLaunch& launch) {
  const LinearParams& call = launch.call;
  return linear_tensor_map(call.x, call.rows, call.depth, call.x_row_stride, rows_of_block(launch));
}

template <class T, class Tile>
void launch_hopper_linear(const LinearLaunch& launch, dim3 grid) {
  const LinearParams& call = launch.call;
  gpu::launch(hopper_linear_kernel<T, Tile>, grid, dim3(Tile::kThreads),
              sizeof(HopperLinearShared<Tile>), call.exec.stream, {.dependent = true}, launch,
              linear_tensor_map(call.weight, call.columns, call.depth, call.weight_row_stride,
                                Tile::kColumns),
              linear_row_map(launch));
}

}  // namespace specdec::cuda
