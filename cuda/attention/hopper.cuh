// Main pass of attention on Hopper: wgmma, bulk tensor copies, warp specialisation. One text for
// all types of matrix operands; what the lines below say of sizes and times is of 16-bit ones,
// hopper_fp8.cuh says where e4m3 differs.
//
// grid    work.num_blocks persistent blocks, one per multiprocessor; block i walks units
//         [block_begin[i], block_begin[i + 1]) and leaves their states
// block   one loading warpgroup, or two if they widen, and 1 to 3 consumer warpgroups of 64 rows
//         each, which share every K and V tile: K/V crosses L2 once per row_tile rows
// loading warp 0 has the copy engine fill the ring of stages; warp 1 zeroes keys of V that are not
//         the unit's, in its first and last tile at most (hopper_load.cuh). e4m3 pages: warps 1 to
//         7 widen them (hopper_widen.cuh); for e4m3 operands 1 to 3 turn V (hopper_transpose.cuh)
// memory  shared, in bytes at K = 128, 16-bit pages, 1 or 2 consumers (HopperShared):
//             0   K, 6 stages of 64 keys x 256: two boxes of 64 columns, 128-byte swizzle
//         98304   V, likewise
//        196608   queries, e4m3 ring, folded sums: nothing here
//        196896   what each row sees, 32 x row_tile; then the barriers, 40 per stage
//         K = 256 and 3 consumers have queries (16 or 32 KB) and sums (32 or 64 KB) of each
//         consumer there and 2 stages; e4m3 3 stages and a ring of 4 or 5 of 64 keys x K bytes
// order   per 64 keys and consumer (hopper_consumer.cuh): S = Q K^T is issued, then O += P V of the
//         block before; when S is there, its softmax; then O is scaled if a row's reference moved,
//         and P is packed. At a chunk's end O is folded into the unit's sum and starts anew.
//         ptxas has the softmax wait for P V, too. Held back, it was no faster (measured).
// begins  while the kernel before ends, where an earlier layer made the plan: looks up units, pages
//         and rows, and brings tiles of committed tokens, which are older than that kernel
// cost    per 64 keys and 64 rows at K = 128: 12 HGMMA (8 of 64x64x16, 4 of 64x128x16), 512 tensor
//         cycles; 32 FMNMX, 32 FFMA, 32 MUFU.EX2, 32 FADD, 16 F2FP per thread, 256 cycles of the
//         MUFU. Shared memory moves 16 KB of K, 16 KB of V and its share of the 32 KB that arrive:
//         384 of the 512 cycles at 128 B/cycle with two consumers. From memory: 32 KB per row_tile.
// limits  132 multiprocessors at 4.3 TB/s get 32 KB in 1.0 us, two consumers compute on it for 1024
//         cycles, 0.6 us: plain decoding and small drafts are bound by memory, from about 200
//         rows per KV head on by wgmma. 256 rows (M = 64, G = 4) over 16k keys, B = 8, 8 KV heads:
//         137 GFLOP, 174 us at 790 TFLOP/s.
//
// A row's bits: S, P and O of a row are computed from its own fragments in an order fixed by the
// key positions; tile height, units and the other rows only decide which warp does it.
#pragma once

#include <cstdint>

#include "attention/hopper_consumer.cuh"
#include "attention/hopper_load.cuh"
#include "attention/hopper_tile.h"
#include "attention/hopper_transpose.cuh"
#include "attention/hopper_widen.cuh"
#include "attention/spec_attention.h"
#include "gpu/hopper.cuh"

namespace specdec::attention::hopper {

template <int kStages>
__device__ __forceinline__ void init_ring(HopperRing<kStages>& ring, unsigned fillers,
                                          unsigned readers) {
  for (int stage = 0; stage < kStages; ++stage) {
    gpu::mbarrier_init(&ring.full[stage], fillers);
    gpu::mbarrier_init(&ring.empty[stage], readers);
  }
}

// Barriers that the copy engine ends wait for one thread besides its bytes.
template <class Tile>
__device__ __forceinline__ void init_barriers(HopperShared<Tile>& shared) {
  using Shared = HopperShared<Tile>;
  constexpr unsigned kConsumerWarps = 4 * Tile::kConsumers;
  init_ring(shared.k_ready, Shared::kRawKeys ? kTurningWarps<Tile> : 1, kConsumerWarps);
  init_ring(shared.v_ready, Shared::kRawValues ? kTurningWarps<Tile> : 1, kConsumerWarps);
  if constexpr (Shared::kRawKeys) init_ring(shared.k_raw, 1, kTurningWarps<Tile>);
  if constexpr (Shared::kRawValues) {
    init_ring(shared.v_raw, 1, kTurningWarps<Tile>);
  } else {
    for (std::uint64_t& landed : shared.v_landed) gpu::mbarrier_init(&landed, 1);
  }
  gpu::mbarrier_init_fence();
}

// The loading warpgroups' other warps: make of raw tiles what the consumers can read.
template <class T, class Tile>
__device__ __forceinline__ void turn_tiles(const AttentionLaunch& launch,
                                           HopperShared<Tile>& shared) {
  if constexpr (Tile::kWiden) {
    widen_tiles<T>(launch, shared);
  } else if constexpr (Tile::kTranspose) {
    transpose_tiles(launch, shared);
  }
}

// The first loading warpgroup: its first warp has the copy engine bring tiles.
template <class T, class Tile>
__device__ __forceinline__ void produce(const AttentionLaunch& launch, const gpu::TensorMap& k_map,
                                        const gpu::TensorMap& v_map, HopperShared<Tile>& shared) {
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  if (warp == 0) {
    if constexpr (Tile::kWiden) {
      load_tiles<Tile>(launch, k_map, v_map, shared.raw_k, shared.k_raw, shared.raw_v, shared.v_raw,
                       shared.v_raw.full);
    } else if constexpr (Tile::kTranspose) {
      load_tiles<Tile>(launch, k_map, v_map, shared.k, shared.k_ready, shared.raw_v, shared.v_raw,
                       shared.v_raw.full);
    } else {
      load_tiles<Tile>(launch, k_map, v_map, shared.k, shared.k_ready, shared.v, shared.v_ready,
                       shared.v_landed);
    }
  } else if constexpr (HopperShared<Tile>::kRawValues) {
    turn_tiles<T>(launch, shared);
  } else if (warp == 1) {
    clean_tiles(launch, shared);
  }
}

// T: of queries in memory, and unless the tile's operands are e4m3 of the matrix instructions.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    hopper_main(const __grid_constant__ AttentionLaunch launch,
                const __grid_constant__ gpu::TensorMap k_map,
                const __grid_constant__ gpu::TensorMap v_map) {
  HopperShared<Tile>& shared = *gpu::dynamic_shared<HopperShared<Tile>>();
  if (threadIdx.x == 0) {
    init_barriers(shared);
    gpu::prefetch_tensor_map(k_map);
    gpu::prefetch_tensor_map(v_map);
  }
  __syncthreads();
  gpu::grid_dependency_wait_if(!launch.plan_is_old);

  const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    if constexpr (Tile::kHandsOver) gpu::setmaxnreg_dec<Tile::kProducerRegisters>();
    produce<T>(launch, k_map, v_map, shared);
  } else if (Tile::kLoaders > 1 && warpgroup == 1) {
    gpu::setmaxnreg_dec<Tile::kProducerRegisters>();
    turn_tiles<T>(launch, shared);
  } else {
    if constexpr (Tile::kHandsOver) gpu::setmaxnreg_inc<Tile::kConsumerRegisters>();
    consume<T>(launch, shared, warpgroup - Tile::kLoaders);
  }
}

}  // namespace specdec::attention::hopper
