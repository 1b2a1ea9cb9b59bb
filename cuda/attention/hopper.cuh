// Main pass of attention on Hopper: wgmma, bulk tensor copies, warp specialisation.
//
// grid    work.num_blocks persistent blocks, one per multiprocessor; block i walks units
//         [block_begin[i], block_begin[i + 1]) and leaves their states
// block   one loading warpgroup and 1 to 3 consumer warpgroups of 64 rows each, which share every K
//         and V tile: K/V crosses L2 once per row_tile rows
// loading warp 0 has the copy engine fill the ring of stages; warp 1 zeroes keys of V that are not
//         the unit's, in its first and last tile at most (hopper_load.cuh). e4m3: warps 1 to 3
//         widen (hopper_widen.cuh)
// memory  shared, in bytes at K = 128, 16-bit pages, 1 or 2 consumers (HopperShared):
//             0   K, 6 stages of 64 keys x 256: two boxes of 64 columns, 128-byte swizzle
//         98304   V, likewise
//        196608   queries, e4m3 ring, folded sums: nothing here
//        196896   what each row sees, 16 x row_tile; then the barriers, 40 per stage
//         K = 256 and 3 consumers have queries (16 or 32 KB) and sums (32 or 64 KB) of each
//         consumer there and 2 stages; e4m3 3 stages and a ring of 4 or 5 of 64 keys x K bytes
// order   per 64 keys and consumer: S = Q K^T is issued, then O += P V of the block before; when S
//         is there its softmax runs beside that P V; then O is scaled if a row's reference moved,
//         and P is packed. At a chunk's end O is folded into the unit's sum and starts anew.
// cost    per 64 keys and 64 rows at K = 128: 12 HGMMA (8 of 64x64x16, 4 of 64x128x16), 512 tensor
//         cycles; 32 FMNMX, 32 FFMA, 32 MUFU.EX2, 32 FADD, 16 F2FP per thread, 256 cycles of the
//         MUFU. Shared memory moves 16 KB of K, 16 KB of V and its share of the 32 KB that arrive:
//         384 of the 512 cycles at 128 B/cycle with two consumers. From memory: 32 KB per row_tile.
// limits  132 multiprocessors at 4.3 TB/s get 32 KB in 1.0 us, two consumers compute on it for 1024
//         cycles, 0.6 us: plain decoding and small drafts are bound by memory, from about 200
//         rows per KV head on by wgmma. 256 rows (M = 64, G = 4) over 16k keys, B = 8, 8 KV heads:
//         137 GFLOP, 174 us at 790 TFLOP/s; softmax is hidden but for the first block of a unit
//         (predicted).
//
// A row's bits: S, P and O of a row are computed from its own fragments in an order fixed by the
// key positions; tile height, units and the other rows only decide which warp does it.
#pragma once

#include <cstdint>

#include "attention/hopper_load.cuh"
#include "attention/hopper_rows.cuh"
#include "attention/hopper_tile.h"
#include "attention/hopper_widen.cuh"
#include "attention/spec_attention.h"
#include "gpu/hopper.cuh"

namespace specdec::attention::hopper {

// Sum over the finished chunks of a unit, this thread's share of its two rows.
template <class Tile, bool kInRegisters = Tile::kFoldInRegisters>
struct FoldedValues {
  float values[Tile::kDim / 2];

  __device__ __forceinline__ FoldedValues(HopperShared<Tile>&, int) {}
  __device__ __forceinline__ float& operator[](int i) { return values[i]; }
};

template <class Tile>
struct FoldedValues<Tile, false> {
  float* values;

  __device__ __forceinline__ FoldedValues(HopperShared<Tile>& shared, int thread)
      : values(reinterpret_cast<float*>(shared.fold) + thread) {}
  __device__ __forceinline__ float& operator[](int i) {
    return values[i * 64 * 2 * Tile::kConsumers];
  }
};

// O += P V. V lies as [key, column]; 16 keys are two groups of 8 lines.
template <class T, class Tile>
__device__ __forceinline__ void add_values(const std::uint32_t (&p)[kBlockKeys / 16][4],
                                           const unsigned char* v, float (&o)[Tile::kDim / 2]) {
#pragma unroll
  for (int step = 0; step < kBlockKeys / 16; ++step) {
    gpu::wgmma_rs_m64k16<T, Tile::kDim, true>(
        o, p[step],
        gpu::wgmma_descriptor(v + step * 2048, gpu::Swizzle::b128, Tile::kBoxBytes, 1024), true);
  }
}

// One consumer warpgroup: 64 rows of every unit of the block.
template <class T, class Tile>
__device__ __forceinline__ void consume(const AttentionLaunch& launch, HopperShared<Tile>& shared,
                                        int consumer) {
  constexpr int kColumns = Tile::kDim / 4;  // of O, in pairs of a thread's two rows
  const SpecAttentionParams& call = launch.call;
  const WorkView& work = launch.work;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp_row = static_cast<int>(threadIdx.x / 32 % 4) * 16;
  RowView* views = reinterpret_cast<RowView*>(shared.rows) + consumer * 64 + warp_row;

  Queries<T, Tile> queries(shared, consumer);
  FoldedValues<Tile> folded(shared, consumer * 128 + static_cast<int>(threadIdx.x % 128));
  float s[kBlockKeys / 2], o[Tile::kDim / 2];
  std::uint32_t p[kBlockKeys / 16][4];
  Cursor<Tile::kStages> k_at, v_at;

  for (std::int32_t u = work.block_begin[blockIdx.x]; u < work.block_begin[blockIdx.x + 1]; ++u) {
    const Unit unit = work.units[u];
    const Job job = work.jobs[unit.job];
    const UnitKeys keys(job, unit);
    const JobRows rows = {request_view(call.step, job.request), job.kv_head,
                          job.row_block * Tile::kRowTile + consumer * 64};
    const ScoreScale scale(score_scale(call, job.kv_head), call.softcap);
    const CommonSlots common = view_rows(launch, rows, warp_row, views);
    const bool folds = unit.first_chunk == job.first_chunk;
    std::int32_t slot = unit.slot;
    std::int32_t chunk = unit.first_chunk;
    std::int32_t chunk_end = chunk_begin(chunk + 1);
    queries.load(launch, rows);

    float m[2] = {empty_max(), empty_max()}, l[2] = {0.0f, 0.0f};
    float m_folded[2] = {empty_max(), empty_max()}, l_folded[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < Tile::kDim / 2; ++i) o[i] = 0.0f, folded[i] = 0.0f;

    // S of a block: raw products to exponentials, in registers.
    const auto weigh = [&](std::int32_t block, float (&decay)[2]) {
      if (scale.mapped) {
#pragma unroll
        for (int i = 0; i < kBlockKeys / 2; ++i) s[i] = scale.map(s[i]);
      }
      const std::int32_t first_slot = block * kBlockKeys;
      if (first_slot < common.begin || first_slot + kBlockKeys > common.end) {
        mask_scores(launch, rows.request.kv_len, views, first_slot, s);
      }
      const float factors[2] = {scale.factor, scale.factor};
      return lagging_softmax(s, factors, kMaxLag, 0.0f, m, l, decay);
    };
    const auto pack_weights = [&] {
#pragma unroll
      for (int step = 0; step < kBlockKeys / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          p[step][i] = pack<T>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
      }
    };
    // Ends a chunk for m and l; what O is merged with follows from the weights.
    const auto close_sums = [&](MergeWeights(&weights)[2]) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        weights[row] = merge_max(m_folded[row], m[row]);
        l_folded[row] = merge(weights[row], l_folded[row], gpu::quad_sum(l[row]));
        m[row] = empty_max(), l[row] = 0.0f;
      }
    };
    const auto close_values = [&](const MergeWeights(&weights)[2]) {
#pragma unroll
      for (int i = 0; i < Tile::kDim / 2; ++i) {
        folded[i] = merge(weights[i / 2 % 2], folded[i], o[i]);
        o[i] = 0.0f;
      }
    };
    // Leaves the folded state in the unit's next slot and starts from an empty one.
    const auto leave_state = [&] {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const std::int32_t at = warp_row + lane / 4 + 8 * row;
        if (rows.exists(at, launch.group)) {
          const std::int64_t state =
              static_cast<std::int64_t>(slot) * Tile::kRowTile + consumer * 64 + at;
          if (lane % 4 == 0) {
            reinterpret_cast<float2*>(work.state_ml)[state] =
                make_float2(m_folded[row], l_folded[row]);
          }
          float2* to = reinterpret_cast<float2*>(work.state_o + state * Tile::kDim) + lane % 4;
#pragma unroll
          for (int n = 0; n < kColumns / 2; ++n) {
            to[4 * n] = make_float2(folded[4 * n + 2 * row], folded[4 * n + 2 * row + 1]);
          }
        }
        m_folded[row] = empty_max(), l_folded[row] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < Tile::kDim / 2; ++i) folded[i] = 0.0f;
      ++slot;
    };
    const auto release = [&](std::uint64_t* empty) {
      __syncwarp();
      if (lane == 0) gpu::mbarrier_arrive(empty);
    };

    float decay[2];
    const std::int32_t end_block = keys.end_block();
    std::int32_t block = keys.first_block();
    gpu::mbarrier_wait(&shared.ready.k_full[k_at.stage], k_at.round);
    gpu::wgmma_hold(s);
    gpu::wgmma_fence();
    queries.multiply(shared.k[k_at.stage], s);
    gpu::wgmma_commit();
    gpu::wgmma_wait<0>();
    gpu::wgmma_hold(s);
    release(&shared.ready.k_empty[k_at.stage]);
    k_at.advance();
    weigh(block, decay);
    pack_weights();

    // While the tensor cores add the values of the block before, the softmax of this one runs.
    while (++block < end_block) {
      gpu::mbarrier_wait(&shared.ready.k_full[k_at.stage], k_at.round);
      gpu::wgmma_hold(s);
      gpu::wgmma_hold(o);
      gpu::wgmma_fence();
      queries.multiply(shared.k[k_at.stage], s);
      gpu::wgmma_commit();
      gpu::mbarrier_wait(&shared.ready.v_full[v_at.stage], v_at.round);
      gpu::wgmma_fence();
      add_values<T, Tile>(p, shared.v[v_at.stage], o);
      gpu::wgmma_commit();
      gpu::wgmma_wait<1>();
      gpu::wgmma_hold(s);
      release(&shared.ready.k_empty[k_at.stage]);
      k_at.advance();

      const bool new_chunk = block * kBlockKeys == chunk_end;
      MergeWeights weights[2];
      if (new_chunk) close_sums(weights);
      const bool moved = weigh(block, decay);

      gpu::wgmma_wait<0>();
      gpu::wgmma_hold(o);
      release(&shared.ready.v_empty[v_at.stage]);
      v_at.advance();
      if (new_chunk) {
        close_values(weights);
        if (!folds) leave_state();
        chunk_end = chunk_begin(++chunk + 1);
      } else if (moved) {
#pragma unroll
        for (int i = 0; i < Tile::kDim / 2; ++i) o[i] *= decay[i / 2 % 2];
      }
      pack_weights();
    }

    gpu::mbarrier_wait(&shared.ready.v_full[v_at.stage], v_at.round);
    gpu::wgmma_hold(o);
    gpu::wgmma_fence();
    add_values<T, Tile>(p, shared.v[v_at.stage], o);
    gpu::wgmma_commit();
    MergeWeights weights[2];
    close_sums(weights);
    gpu::wgmma_wait<0>();
    gpu::wgmma_hold(o);
    release(&shared.ready.v_empty[v_at.stage]);
    v_at.advance();
    close_values(weights);
    leave_state();
  }
}

// Barriers that the copy engine ends wait for one thread besides its bytes.
template <class Tile>
__device__ __forceinline__ void init_barriers(HopperShared<Tile>& shared) {
  constexpr int kFillers = Tile::kWiden ? kWideningWarps : 1;
  for (int stage = 0; stage < Tile::kStages; ++stage) {
    gpu::mbarrier_init(&shared.ready.k_full[stage], kFillers);
    gpu::mbarrier_init(&shared.ready.v_full[stage], kFillers);
    gpu::mbarrier_init(&shared.ready.k_empty[stage], 4 * Tile::kConsumers);  // warps
    gpu::mbarrier_init(&shared.ready.v_empty[stage], 4 * Tile::kConsumers);
    if constexpr (!Tile::kWiden) gpu::mbarrier_init(&shared.v_landed[stage], 1);
  }
  if constexpr (Tile::kWiden) {
    for (int stage = 0; stage < Tile::kLoadStages; ++stage) {
      gpu::mbarrier_init(&shared.raw.k_full[stage], 1);
      gpu::mbarrier_init(&shared.raw.v_full[stage], 1);
      gpu::mbarrier_init(&shared.raw.k_empty[stage], kWideningWarps);
      gpu::mbarrier_init(&shared.raw.v_empty[stage], kWideningWarps);
    }
  }
  gpu::mbarrier_init_fence();
}

// T: of queries and of the matrix instructions.
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
  gpu::grid_dependency_wait();
  gpu::launch_dependents();

  const int warpgroup = __shfl_sync(kWarp, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    if constexpr (Tile::kConsumers > 1) gpu::setmaxnreg_dec<Tile::kProducerRegisters>();
    const int warp = __shfl_sync(kWarp, static_cast<int>(threadIdx.x / 32), 0);
    if constexpr (Tile::kWiden) {
      if (warp == 0) {
        load_tiles<Tile>(launch, k_map, v_map, shared.raw_k, shared.raw_v, shared.raw,
                         shared.raw.v_full);
      } else {
        widen_tiles<T>(launch, shared);
      }
    } else if (warp == 0) {
      load_tiles<Tile>(launch, k_map, v_map, shared.k, shared.v, shared.ready, shared.v_landed);
    } else if (warp == 1) {
      clean_tiles(launch, shared);
    }
  } else {
    if constexpr (Tile::kConsumers > 1) gpu::setmaxnreg_inc<Tile::kConsumerRegisters>();
    consume<T>(launch, shared, warpgroup - 1);
  }
}

}  // namespace specdec::attention::hopper
