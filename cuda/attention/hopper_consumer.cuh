// A consumer warpgroup of the Hopper family's kernel: 64 rows of every unit of the block. Scores,
// masks, softmax, chunks and states of every type of operands; the matrix products are the tile's
// (Products: hopper_products.cuh, hopper_fp8.cuh).
#pragma once

#include <cstdint>

#include "attention/hopper_fp8.cuh"
#include "attention/hopper_load.cuh"
#include "attention/hopper_products.cuh"
#include "attention/hopper_rows.cuh"
#include "attention/hopper_tile.h"
#include "attention/output.cuh"
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

  Products<T, Tile> products(shared, consumer);
  FoldedValues<Tile> folded(shared, consumer * 128 + static_cast<int>(threadIdx.x % 128));
  float s[kBlockKeys / 2];
  // The folded state: empty between units, unless one hands it on to the next.
  float m_folded[2] = {empty_max(), empty_max()}, l_folded[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < Tile::kDim / 2; ++i) folded[i] = 0.0f;
  Cursor<Tile::kStages> k_at;
  Cursor<Tile::kValueStages> v_at;

  for (std::int32_t u = work.block_begin[blockIdx.x]; u < work.block_begin[blockIdx.x + 1]; ++u) {
    const Unit unit = work.units[u];
    const Job job = work.jobs[unit.job];
    const UnitKeys keys(job, unit);
    const JobRows rows = {request_view(call.step, job.request), job.kv_head,
                          job.row_block * Tile::kRowTile + consumer * 64};
    const ScoreScale scale(score_scale(call, job.kv_head), call.softcap);
    const CommonSlots common = view_rows(launch, rows, warp_row, views);
    const bool folds = unit.states != UnitStates::kOnePerChunk;
    std::int32_t slot = unit.slot;
    std::int32_t chunk = unit.first_chunk;
    std::int32_t chunk_end = chunk_begin(chunk + 1);
    gpu::grid_dependency_wait();  // the queries are there; nothing from the second unit on
    gpu::launch_dependents();
    products.load(launch, rows);
    // A unit is a power of two: the product is exact.
    const float factors[2] = {scale.factor * (scale.mapped ? 1.0f : products.unit(0)),
                              scale.factor * (scale.mapped ? 1.0f : products.unit(1))};

    float m[2] = {empty_max(), empty_max()}, l[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < Tile::kDim / 2; ++i) products.sum(i) = 0.0f;

    // S of a block: raw products to exponentials, in registers.
    const auto weigh = [&](std::int32_t block, float (&decay)[2]) {
      if (scale.mapped) {
#pragma unroll
        for (int i = 0; i < kBlockKeys / 2; ++i) s[i] = scale.map(s[i] * products.unit(i / 2 % 2));
      }
      const std::int32_t first_slot = block * kBlockKeys;
      if (first_slot < common.begin || first_slot + kBlockKeys > common.end) {
        mask_scores(launch, rows.request.kv_len, views, first_slot, s);
      }
      return lagging_softmax(s, factors, products.kMaxLag, products.kHeadroom, m, l, decay);
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
        folded[i] = merge(weights[i / 2 % 2], folded[i], products.sum(i));
        products.sum(i) = 0.0f;
      }
    };
    const auto clear = [&] {
#pragma unroll
      for (int row = 0; row < 2; ++row) m_folded[row] = empty_max(), l_folded[row] = 0.0f;
#pragma unroll
      for (int i = 0; i < Tile::kDim / 2; ++i) folded[i] = 0.0f;
    };
    // Leaves the folded state in the unit's next slot and starts from an empty one.
    const auto leave_state = [&] {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const std::int32_t at = warp_row + lane / 4 + 8 * row;
        const bool exists = rows.exists(at, launch.group);
        const std::int64_t state =
            static_cast<std::int64_t>(slot) * Tile::kRowTile + consumer * 64 + at;
        if (exists && lane % 4 == 0) {
          reinterpret_cast<float2*>(work.state_ml)[state] =
              make_float2(m_folded[row], l_folded[row]);
        }
        // A thread has two numbers of every 8. It gives a neighbour its two of one 8 for the
        // neighbour's of another: four in a row are one store.
        const bool odd = lane % 2 != 0;
        float* to = work.state_o + state * Tile::kDim + (odd ? 8 : 0) + lane / 2 % 2 * 4;
#pragma unroll
        for (int n = 0; n < kColumns / 2; n += 2) {
          float2 own[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            own[i] = make_float2(folded[4 * (n + i) + 2 * row], folded[4 * (n + i) + 2 * row + 1]);
          }
          const float2 kept = odd ? own[1] : own[0], given = odd ? own[0] : own[1];
          const float2 got = make_float2(__shfl_xor_sync(kAllLanes, given.x, 1),
                                         __shfl_xor_sync(kAllLanes, given.y, 1));
          if (exists) {
            *reinterpret_cast<float4*>(to + 8 * n) =
                odd ? make_float4(got.x, got.y, kept.x, kept.y)
                    : make_float4(kept.x, kept.y, got.x, got.y);
          }
        }
      }
      clear();
      ++slot;
    };
    // The folded state is all of the job: its output.
    const auto write_rows = [&](const Job& whole) {
      // By the block's threads: what follows from `consumer` would be kept through the loop.
      const int first = (static_cast<int>(threadIdx.x / 32) - 4 * Tile::kLoaders) * 16 + lane / 4;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        write_fragment_row<T, Tile::kDim>(
            launch, whole, first + 8 * row, m_folded[row], l_folded[row], [&](int n) {
              return make_float2(folded[4 * n + 2 * row], folded[4 * n + 2 * row + 1]);
            });
      }
      clear();
    };
    const auto release = [&](std::uint64_t* empty) {
      __syncwarp();
      if (lane == 0) gpu::mbarrier_arrive(empty);
    };

    float decay[2];
    const std::int32_t end_block = keys.end_block();
    std::int32_t block = keys.first_block();
    gpu::mbarrier_wait(&shared.k_ready.full[k_at.stage], k_at.round);
    gpu::wgmma_hold(s);
    gpu::wgmma_fence();
    products.multiply_keys(shared.k[k_at.stage], s);
    gpu::wgmma_commit();
    gpu::wgmma_wait<0>();
    gpu::wgmma_hold(s);
    release(&shared.k_ready.empty[k_at.stage]);
    k_at.advance();
    weigh(block, decay);
    products.rescale(decay, false);  // there are no sums yet
    products.pack_weights(s);

    // The values of the block before are added while this one's scores are computed.
    while (++block < end_block) {
      gpu::mbarrier_wait(&shared.k_ready.full[k_at.stage], k_at.round);
      gpu::wgmma_hold(s);
      products.hold();
      gpu::wgmma_fence();
      products.multiply_keys(shared.k[k_at.stage], s);
      gpu::wgmma_commit();
      gpu::mbarrier_wait(&shared.v_ready.full[v_at.stage], v_at.round);
      gpu::wgmma_fence();
      products.multiply_values(shared.v[v_at.stage]);
      gpu::wgmma_commit();
      gpu::wgmma_wait<1>();
      gpu::wgmma_hold(s);
      release(&shared.k_ready.empty[k_at.stage]);
      k_at.advance();

      const bool new_chunk = block * kBlockKeys == chunk_end;
      MergeWeights weights[2];
      if (new_chunk) close_sums(weights);
      const bool moved = weigh(block, decay);

      gpu::wgmma_wait<0>();
      products.hold();
      release(&shared.v_ready.empty[v_at.stage]);
      v_at.advance();
      products.collect();
      if (new_chunk) {
        close_values(weights);
        if (!folds) leave_state();
        chunk_end = chunk_begin(++chunk + 1);
      }
      products.rescale(decay, moved && !new_chunk);  // a chunk begins without sums
      products.pack_weights(s);
    }

    gpu::mbarrier_wait(&shared.v_ready.full[v_at.stage], v_at.round);
    products.hold();
    gpu::wgmma_fence();
    products.multiply_values(shared.v[v_at.stage]);
    gpu::wgmma_commit();
    MergeWeights weights[2];
    close_sums(weights);
    gpu::wgmma_wait<0>();
    products.hold();
    release(&shared.v_ready.empty[v_at.stage]);
    v_at.advance();
    products.collect();
    close_values(weights);
    // Read again: a register that was kept through the loop would be one too many.
    const Unit& ends = work.units[u];
    if (ends.states == UnitStates::kHandsOn) continue;
    const Job& ended = work.jobs[ends.job];
    if (main_writes(launch, ended.num_slots)) {
      write_rows(ended);
    } else {
      leave_state();
    }
  }
  gpu::grid_dependency_wait();  // without a unit, too: what begins behind this kernel relies on it
}

}  // namespace specdec::attention::hopper
