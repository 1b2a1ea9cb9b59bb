// out = x weight^T + bias with tensor cores, for 16-bit dtypes; the weight in the same dtype or
// packed in 8 or 4 bits (Config::Weights).
//
// Grid      (row tiles x column tiles, units): row tiles of one column tile are neighbours, so that
//           a weight that several of them need comes from memory once. A unit is a run of parts of
//           k (linear_plan.h); with several, blocks leave partial sums that linear.cu adds.
// Block     mma m16n8k16 with the weight as its 16 rows and the tokens as its 8 columns: one token
//           costs a tile of 8. Weights and x come by cp.async in stages of 64 k. A narrow block's
//           warps have each a ring of stages and a part of k of their own and meet at the end of a
//           group, to fold; the warps of the others share a ring and walk k together.
// Shared    [rings][stages][weights, x lines of 128 bytes, swizzled]; the warps' parts of a group
//           (narrow); at the end the finished tile, where the rings were.
// Bytes     the weight's from memory; x once per column tile, from L2.
// Limit     16-bit weights: their bytes up to about 64 rows, L2 and the tensor cores above. Packed
//           ones: issue slots of the decoding, near the bytes' time; the tensor cores above 32
//           rows.
// Arithmetic: backend/linear_op.h. An element's sum is the same whatever tile, block or warp has
// it.
#pragma once

#include <cstdint>

#include "gpu/gpu.cuh"
#include "kv/elements.cuh"
#include "linear/linear_config.cuh"
#include "linear/linear_launch.cuh"
#include "linear/linear_plan.h"

namespace specdec::cuda {

// One tile's place in the call.
template <class Config>
struct LinearBlock {
  std::int32_t first_row, first_column, first_part;

  __device__ __forceinline__ explicit LinearBlock(const LinearLaunch& launch) {
    const auto index = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t column_tile = index / launch.row_tiles;
    first_row = (index - column_tile * launch.row_tiles) * Config::kRowTile;
    first_column = column_tile * Config::kColumnTile;
    first_part = static_cast<std::int32_t>(blockIdx.y) * launch.parts_per_unit;
  }
};

// Chunks of a part; 0 if it is empty.
__device__ __forceinline__ int chunks_of_part(const LinearLaunch& launch, std::int32_t part) {
  // Empty parts begin at most kLinearChunk times their number behind the depth: int32 holds that.
  const std::int32_t left = launch.call.depth - part * launch.part_depth;
  if (left <= 0) return 0;
  const std::int32_t length = left < launch.part_depth ? left : launch.part_depth;
  return static_cast<int>(static_cast<std::uint32_t>(length + kLinearChunk - 1) / kLinearChunk);
}

// A thread's share of the copies of x: pieces of lines kLines apart. What lies outside of the
// matrix is zero.
template <class Config>
struct RowCopier {
  using T = typename Config::T;
  static constexpr int kLines = Config::kRingThreads / Config::kLinePieces;
  static_assert(Config::kRowTile % kLines == 0 && kLines % 4 == 0, "every thread copies as much");
  const T* from;             // its piece of its first line at k = 0, if there is such a row
  std::int64_t step;         // elements to its next line
  std::int32_t rows, depth;  // that there are from its first line and piece on
  int line, piece;

  __device__ __forceinline__ RowCopier(const LinearParams& call, std::int32_t first_row, int thread)
      : from(static_cast<const T*>(call.x)),
        step(kLines * call.x_row_stride),
        line(thread / Config::kLinePieces),
        piece(thread % Config::kLinePieces) {
    rows = call.rows - first_row - line;
    depth = call.depth - piece * 8;
    if (rows > 0) from += (first_row + line) * call.x_row_stride;
  }
  __device__ __forceinline__ void copy(unsigned char* lines, std::int32_t k) const {
    const bool inside = k < depth;
    const T* here = from + (inside ? k + piece * 8 : 0);
#pragma unroll
    for (int i = 0; i < Config::kRowTile / kLines; ++i) {
      const bool valid = inside && i * kLines < rows;
      gpu::cp_async_16(lines + Config::swizzle(line + i * kLines, piece),
                       valid ? here + i * step : from, valid);
    }
  }
};

// The copies of one ring: chunk after chunk of its parts, in order.
template <class Config>
struct LinearCopier {
  const LinearLaunch& launch;
  const LinearBlock<Config>& block;
  typename Config::Weights::template Copier<Config> weights;
  RowCopier<Config> rows;
  unsigned char* ring;
  std::int32_t part, part_end;  // of this ring's, next and past the last
  int chunk = 0, chunks;        // of `part`

  static constexpr int kPartStep = Config::kNarrow ? kLinearGroupParts : 1;

  __device__ __forceinline__ LinearCopier(const LinearLaunch& launch,
                                          const LinearBlock<Config>& block, unsigned char* ring,
                                          int thread, std::int32_t part)
      : launch(launch),
        block(block),
        weights(launch.call, block.first_column, thread),
        rows(launch.call, block.first_row, thread),
        ring(ring),
        part(part),
        part_end(block.first_part + launch.parts_per_unit),
        chunks(chunks_of_part(launch, part)) {}

  __device__ __forceinline__ bool done() const { return chunk >= chunks; }

  // Starts the copies of the next chunk into `stage`: of the weights, of x or of both. What lies
  // outside of the matrices is zero.
  template <bool kWeights, bool kRows>
  __device__ __forceinline__ void copy(int stage) const {
    if (done()) return;
    unsigned char* to = ring + stage * Config::kStageBytes;
    const std::int32_t k = part * launch.part_depth + chunk * kLinearChunk;
    if constexpr (kWeights) weights.copy(to, k);
    if constexpr (kRows) rows.copy(to + Config::kWeightBytes, k);
  }

  __device__ __forceinline__ void next() {
    if (done() || ++chunk < chunks) return;
    part += kPartStep;
    chunk = 0;
    // Behind an empty part all are.
    chunks = part < part_end ? chunks_of_part(launch, part) : 0;
  }
};

// The threads of a ring meet.
template <class Config>
__device__ __forceinline__ void sync_ring() {
  if constexpr (Config::kNarrow) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// A warp's sums: fragment [m, n] is columns 16 m .. by rows 8 n .. of its tile; of its element c
// lane l has column l / 4 + 8 (c / 2) and row 2 (l % 4) + c % 2.
template <class Config>
struct WarpSums {
  float at[Config::kColumnFragments][Config::kRowFragments][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) (&at[0][0][0])[i] = 0.0f;
  }
  __device__ __forceinline__ void add(const WarpSums& other) {
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) (&at[0][0][0])[i] += (&other.at[0][0][0])[i];
  }
  static __device__ __forceinline__ int column(int i, int lane) {
    return i / (Config::kRowFragments * 4) * 16 + lane / 4 + (i % 4 / 2) * 8;
  }
  static __device__ __forceinline__ int row(int i, int lane) {
    return i / 4 % Config::kRowFragments * 8 + lane % 4 * 2 + i % 2;
  }
};

// sums += the products of one stage, k ascending.
template <class Config>
__device__ __forceinline__ void multiply_stage(const unsigned char* stage, int column, int row,
                                               WarpSums<Config>& sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  typename Config::Weights::template Operand<Config> weights(stage, column, lane);
  const unsigned char* rows = stage + Config::kWeightBytes;
#pragma unroll Config::kStepUnroll
  for (int step = 0; step < kLinearChunk / 16; ++step) {
    std::uint32_t a[Config::kColumnFragments][4];
#pragma unroll
    for (int m = 0; m < Config::kColumnFragments; ++m) weights.load(step, m, a[m]);
#pragma unroll
    for (int n = 0; n < Config::kRowFragments; n += 2) {
      std::uint32_t b[4];
      if constexpr (Config::kRowFragments == 1) {
        std::uint32_t pair[2];
        gpu::ldmatrix_x2(pair, rows + Config::swizzle(row + lane % 8, step * 2 + lane / 8 % 2));
        b[0] = pair[0], b[1] = pair[1];
      } else {
        const int line = row + (n + lane / 16) * 8 + lane % 8;
        gpu::ldmatrix_x4(b, rows + Config::swizzle(line, step * 2 + lane / 8 % 2));
      }
#pragma unroll
      for (int m = 0; m < Config::kColumnFragments; ++m) {
        gpu::mma_m16n8k16<typename Config::T>(sums.at[m][n], a[m], b[0], b[1]);
        if constexpr (Config::kRowFragments > 1) {
          gpu::mma_m16n8k16<typename Config::T>(sums.at[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
}

// The tile in shared memory to where it belongs. All threads of the block.
template <class Config>
__device__ __forceinline__ void store_tile(const LinearLaunch& launch,
                                           const LinearBlock<Config>& block, const float* tile) {
  constexpr int kVectors = Config::kColumnTile / kLaneElements;
  for (int v = static_cast<int>(threadIdx.x); v < Config::kRowTile * kVectors;
       v += Config::kThreads) {
    const int r = v / kVectors, c = v % kVectors * kLaneElements;
    const std::int32_t row = block.first_row + r, column = block.first_column + c;
    if (row >= launch.call.rows || column >= launch.call.columns) continue;
    float sums[kLaneElements];
    load_floats(tile + r * Config::kTilePitch + c, true, sums);
    store_sums<typename Config::T>(launch, static_cast<std::int32_t>(blockIdx.y), row, column,
                                   sums);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    linear_kernel(const LinearLaunch launch) {
  using Sums = WarpSums<Config>;
  unsigned char* smem = gpu::dynamic_shared<unsigned char>();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const LinearBlock<Config> block(launch);
  const int ring_index = Config::kNarrow ? warp : 0;
  unsigned char* ring = smem + ring_index * Config::kRingBytes;
  constexpr int kAhead = Config::kStages - 1;

  LinearCopier<Config> copier(launch, block, ring, thread % Config::kRingThreads,
                              block.first_part + ring_index);
  if (!launch.call.constant_weight) gpu::grid_dependency_wait();
  // What the kernel before this one wrote is x; the first weights may be on their way before.
  LinearCopier<Config> weights = copier;
#pragma unroll
  for (int s = 0; s < kAhead; ++s, weights.next()) weights.template copy<true, false>(s);
  if (launch.call.constant_weight) gpu::grid_dependency_wait();
  gpu::launch_dependents();
#pragma unroll
  for (int s = 0; s < kAhead; ++s, copier.next()) {
    copier.template copy<false, true>(s);
    gpu::cp_async_commit();
  }

  const int warp_column = Config::kNarrow ? 0 : warp % (Config::kColumnTile / 32) * 32;
  const int warp_row = Config::kNarrow ? 0 : warp / (Config::kColumnTile / 32) * Config::kWarpRows;
  const bool busy = block.first_column + warp_column < launch.call.columns &&
                    block.first_row + warp_row < launch.call.rows;
  int stage = 0, filled = kAhead;
  Sums sums;
  // The sums of one part.
  const auto walk = [&](std::int32_t part) {
    sums.clear();
    const int chunks = chunks_of_part(launch, part);
    for (int c = 0; c < chunks; ++c) {
      gpu::cp_async_wait<kAhead - 1>();
      sync_ring<Config>();  // all of the ring's copies are there, and `filled` is read no more
      copier.template copy<true, true>(filled);
      gpu::cp_async_commit();
      copier.next();
      filled = filled + 1 == Config::kStages ? 0 : filled + 1;
      if (busy) multiply_stage(ring + stage * Config::kStageBytes, warp_column, warp_row, sums);
      stage = stage + 1 == Config::kStages ? 0 : stage + 1;
    }
  };

  float* tile = reinterpret_cast<float*>(smem);
  const std::int32_t end_part = block.first_part + launch.parts_per_unit;
  if constexpr (Config::kNarrow) {
    // Element i * 32 + l of a warp's parts is sum i of lane l; a thread folds every kThreads-th.
    float* parts = reinterpret_cast<float*>(smem + Config::kPartsOffset);
    constexpr int kPart = Config::kSums * 32;
    float total[Config::kFolds];
    for (std::int32_t first = block.first_part; first < end_part; first += kLinearGroupParts) {
      walk(first + warp);
      if (first != block.first_part) __syncthreads();  // the last group's parts are read
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) {
        parts[warp * kPart + i * 32 + lane] = (&sums.at[0][0][0])[i];
      }
      __syncthreads();
#pragma unroll
      for (int f = 0; f < Config::kFolds; ++f) {
        const int element = thread + f * Config::kThreads;
        float group = parts[element];
#pragma unroll
        for (int w = 1; w < kLinearGroupParts; ++w) group += parts[w * kPart + element];
        total[f] = first == block.first_part ? group : total[f] + group;
      }
    }
    gpu::cp_async_wait<0>();
    __syncthreads();  // the rings are read: the tile takes their place
#pragma unroll
    for (int f = 0; f < Config::kFolds; ++f) {
      const int element = thread + f * Config::kThreads;
      const int i = element / 32, l = element % 32;
      tile[Sums::row(i, l) * Config::kTilePitch + Sums::column(i, l)] = total[f];
    }
  } else {
    Sums total;
    walk(block.first_part);
    total = sums;
    for (std::int32_t part = block.first_part + 1; part < end_part; ++part) {
      walk(part);
      total.add(sums);
    }
    gpu::cp_async_wait<0>();
    __syncthreads();  // as above
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) {
      tile[(warp_row + Sums::row(i, lane)) * Config::kTilePitch + warp_column +
           Sums::column(i, lane)] = (&total.at[0][0][0])[i];
    }
  }
  __syncthreads();
  store_tile<Config>(launch, block, tile);
}

template <class Config>
void launch_linear(const LinearLaunch& launch, dim3 grid) {
  const gpu::LaunchOptions options{.dependent = true};
  gpu::launch(linear_kernel<Config>, grid, dim3(Config::kThreads), Config::kSharedBytes,
              launch.call.exec.stream, options, launch);
}

}  // namespace specdec::cuda
