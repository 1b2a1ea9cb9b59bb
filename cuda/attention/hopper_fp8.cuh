// Main pass of attention on Hopper with e4m3 matrix operands, over e4m3 pages: twice the matrix
// rate of hopper.cuh, for queries and weights of 3 mantissa bits. Only ever chosen by name.
//
// grid    as hopper.cuh
// block   as hopper.cuh: warp 0 has the copy engine fill the ring, K straight into the consumers'
//         tiles; warps 1 to 3 transpose V (hopper_transpose.cuh); 1 or 2 consumer warpgroups
// Q       a row is multiplied by the power of two that brings its largest number to [128, 256) and
//         rounded; the power's inverse goes into the factor of its scores
// P       2^(score - reference), the reference 8 below the row's running maximum: weights reach 256
//         of e4m3's 448, and what is 2^-17 of the largest still counts. Rounded for P V; the row's
//         sum is taken before rounding
// sums    the products' accumulators keep fewer bits than float32: each block of 64 keys has its
//         own, which are added to float32 sums, O = O * decay + P V
// memory  shared, 2 consumers: 6 stages of K and of V as loaded (16 KB), 4 of transposed V (8 KB),
//         folded sums 64 KB, 194 KB in all
// cost    per 64 keys and 64 rows at K = 128: 6 QGMMA (4 of 64x64x32, 2 of 64x128x32), 256 tensor
//         cycles; the exponentials take the MUFU as long, 256 cycles, and P V's promotion 64 FFMA
//         per thread, 64 cycles of all lanes. So two consumers that hide each other's softmax are
//         bound by tensor cores and MUFU alike
// limits  memory: 16 KB per block of keys, half of hopper.cuh
//
// A row's bits: as hopper.cuh; its keys end at a multiple of 32, what one instruction sums.
#pragma once

#include <cstdint>

#include "attention/hopper_load.cuh"
#include "attention/hopper_rows.cuh"
#include "attention/hopper_transpose.cuh"
#include "attention/spec_attention.h"
#include "gpu/hopper.cuh"

namespace specdec::attention::hopper {

inline constexpr float kFp8Headroom = 8.0f;  // log2 of the greatest weight

// Four floats as e4m3, the first in the lowest byte: to nearest, at most 448, NaN stays NaN.
__device__ __forceinline__ std::uint32_t pack_e4m3(float a, float b, float c, float d) {
  const std::uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const std::uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// Queries of two rows of a thread as e4m3 A fragments, and what their scores must be multiplied by.
template <class T, class Tile>
struct Fp8Queries {
  std::uint32_t fragments[Tile::kDim / 32][4];
  float inverse[2];

  __device__ __forceinline__ void load(const AttentionLaunch& launch, const JobRows& rows) {
    const SpecAttentionParams& call = launch.call;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp_row = static_cast<int>(threadIdx.x / 32 % 4) * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t row = warp_row + lane / 4 + 8 * half;
      const bool exists = rows.exists(row, launch.group);
      const std::int32_t token = (rows.first_row + row) / launch.group;
      const std::int32_t head = rows.kv_head * launch.group + (rows.first_row + row) % launch.group;
      const T* q = static_cast<const T*>(call.q) +
                   (rows.request.first_row + token) * call.q_row_stride + head * Tile::kDim +
                   4 * (lane % 4);
      uint2 in[Tile::kDim / 16];
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < Tile::kDim / 16; ++i) {
        in[i] = exists ? *reinterpret_cast<const uint2*>(q + 16 * i) : make_uint2(0, 0);
        const float2 low = unpack<T>(in[i].x), high = unpack<T>(in[i].y);
        largest = fmaxf(
            largest, fmaxf(fmaxf(fabsf(low.x), fabsf(low.y)), fmaxf(fabsf(high.x), fabsf(high.y))));
      }
      const float factor = power_for(gpu::quad_max(largest), inverse[half]);
#pragma unroll
      for (int i = 0; i < Tile::kDim / 16; ++i) {
        const float2 low = unpack<T>(in[i].x), high = unpack<T>(in[i].y);
        fragments[i / 2][half + i % 2 * 2] =
            pack_e4m3(low.x * factor, low.y * factor, high.x * factor, high.y * factor);
      }
    }
  }

  // s = Q K^T for the block of keys in k.
  __device__ __forceinline__ void multiply(const unsigned char* k, float (&s)[kBlockKeys / 2]) {
#pragma unroll
    for (int step = 0; step < Tile::kDim / 32; ++step) {
      gpu::wgmma_rs_m64k32_e4m3<kBlockKeys>(
          s, fragments[step],
          gpu::wgmma_descriptor(k + step * 32, gpu::Swizzle::b128, 0, 8 * Tile::kDim), step > 0);
    }
  }

 private:
  // The power of two that brings `largest` to [128, 256), and its inverse; what is below 2^-31
  // stays small, so that a factor of scores never becomes 0. A row that holds an infinity becomes
  // NaN, not 448.
  static __device__ __forceinline__ float power_for(float largest, float& inverse) {
    const std::uint32_t exponent = max(__float_as_uint(largest) >> 23, 96u);
    inverse = __uint_as_float((exponent - 7) << 23);
    return exponent == 255 ? __uint_as_float(0x7fc00000u) : __uint_as_float((261 - exponent) << 23);
  }
};

// part = P V. V lies as [column, key], 32 keys to an instruction.
template <class Tile>
__device__ __forceinline__ void multiply_values(const std::uint32_t (&p)[kBlockKeys / 32][4],
                                                const unsigned char* v,
                                                float (&part)[Tile::kDim / 2]) {
#pragma unroll
  for (int step = 0; step < kBlockKeys / 32; ++step) {
    gpu::wgmma_rs_m64k32_e4m3<Tile::kDim>(
        part, p[step], gpu::wgmma_descriptor(v + step * 32, gpu::Swizzle::b64, 0, 8 * kBlockKeys),
        step > 0);
  }
}

// One consumer warpgroup: 64 rows of every unit of the block.
template <class T, class Tile>
__device__ __forceinline__ void consume_fp8(const AttentionLaunch& launch,
                                            HopperFp8Shared<Tile>& shared, int consumer) {
  constexpr int kThreadRows = 128 * Tile::kConsumers;
  const SpecAttentionParams& call = launch.call;
  const WorkView& work = launch.work;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp_row = static_cast<int>(threadIdx.x / 32 % 4) * 16;
  RowView* views = reinterpret_cast<RowView*>(shared.rows) + consumer * 64 + warp_row;
  float* folded =
      reinterpret_cast<float*>(shared.fold) + consumer * 128 + static_cast<int>(threadIdx.x % 128);

  Fp8Queries<T, Tile> queries;
  float s[kBlockKeys / 2], part[Tile::kDim / 2], o[Tile::kDim / 2];
  std::uint32_t p[kBlockKeys / 32][4];
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
    const bool folds = unit.first_chunk == job.first_chunk;
    std::int32_t slot = unit.slot;
    std::int32_t chunk = unit.first_chunk;
    std::int32_t chunk_end = chunk_begin(chunk + 1);
    queries.load(launch, rows);
    // A power of two: the product is exact.
    const float factors[2] = {scale.factor * (scale.mapped ? 1.0f : queries.inverse[0]),
                              scale.factor * (scale.mapped ? 1.0f : queries.inverse[1])};

    float m[2] = {empty_max(), empty_max()}, l[2] = {0.0f, 0.0f};
    float m_folded[2] = {empty_max(), empty_max()}, l_folded[2] = {0.0f, 0.0f};
    float decay[2];  // of O, before the values are added that the weights in p belong to
#pragma unroll
    for (int i = 0; i < Tile::kDim / 2; ++i) o[i] = 0.0f, folded[i * kThreadRows] = 0.0f;

    // S of a block: raw products to exponentials, in registers.
    const auto weigh = [&](std::int32_t block, float (&now)[2]) {
      if (scale.mapped) {
#pragma unroll
        for (int i = 0; i < kBlockKeys / 2; ++i) {
          s[i] = scale.map(s[i] * queries.inverse[i / 2 % 2]);
        }
      }
      const std::int32_t first_slot = block * kBlockKeys;
      if (first_slot < common.begin || first_slot + kBlockKeys > common.end) {
        mask_scores(launch, rows.request.kv_len, views, first_slot, s);
      }
      lagging_softmax(s, factors, 0.0f, kFp8Headroom, m, l, now);
    };
    // Two groups of 8 keys, columns 2 t and 2 t + 1 of each, are 4 neighbours of A.
    const auto pack_weights = [&] {
#pragma unroll
      for (int i = 0; i < kBlockKeys / 16; ++i) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const float* two = &s[8 * i + 2 * row];
          p[i / 2][row + i % 2 * 2] = pack_e4m3(two[0], two[1], two[4], two[5]);
        }
      }
    };
    const auto add_part = [&] {
#pragma unroll
      for (int i = 0; i < Tile::kDim / 2; ++i) o[i] = fmaf(o[i], decay[i / 2 % 2], part[i]);
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
        folded[i * kThreadRows] = merge(weights[i / 2 % 2], folded[i * kThreadRows], o[i]);
        o[i] = 0.0f;
      }
    };
    // Leaves the folded state in the unit's next slot and starts from an empty one.
    const auto leave_state = [&] {
      float* state_o = work.state_o + std::int64_t{slot} * Tile::kRowTile * Tile::kDim;
      float* state_ml = work.state_ml + std::int64_t{slot} * Tile::kRowTile * 2;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const std::int32_t at = warp_row + lane / 4 + 8 * row;
        if (rows.exists(at, launch.group)) {
          const std::int32_t place = consumer * 64 + at;
          if (lane % 4 == 0) {
            reinterpret_cast<float2*>(state_ml)[place] = make_float2(m_folded[row], l_folded[row]);
          }
          float2* to = reinterpret_cast<float2*>(state_o + place * Tile::kDim) + lane % 4;
#pragma unroll
          for (int n = 0; n < Tile::kDim / 8; ++n) {
            const float* pair = folded + (4 * n + 2 * row) * kThreadRows;
            to[4 * n] = make_float2(pair[0], pair[kThreadRows]);
          }
        }
        m_folded[row] = empty_max(), l_folded[row] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < Tile::kDim / 2; ++i) folded[i * kThreadRows] = 0.0f;
      ++slot;
    };
    const auto release = [&](std::uint64_t* empty) {
      __syncwarp();
      if (lane == 0) gpu::mbarrier_arrive(empty);
    };

    const std::int32_t end_block = keys.end_block();
    std::int32_t block = keys.first_block();
    gpu::mbarrier_wait(&shared.load.k_full[k_at.stage], k_at.round);
    gpu::wgmma_hold(s);
    gpu::wgmma_fence();
    queries.multiply(shared.k[k_at.stage], s);
    gpu::wgmma_commit();
    gpu::wgmma_wait<0>();
    gpu::wgmma_hold(s);
    release(&shared.load.k_empty[k_at.stage]);
    k_at.advance();
    weigh(block, decay);
    pack_weights();

    // While the tensor cores multiply the values of the block before, the softmax of this one runs.
    while (++block < end_block) {
      gpu::mbarrier_wait(&shared.load.k_full[k_at.stage], k_at.round);
      gpu::wgmma_hold(s);
      gpu::wgmma_hold(part);
      gpu::wgmma_fence();
      queries.multiply(shared.k[k_at.stage], s);
      gpu::wgmma_commit();
      gpu::mbarrier_wait(&shared.v_full[v_at.stage], v_at.round);
      gpu::wgmma_fence();
      multiply_values<Tile>(p, shared.v[v_at.stage], part);
      gpu::wgmma_commit();
      gpu::wgmma_wait<1>();
      gpu::wgmma_hold(s);
      release(&shared.load.k_empty[k_at.stage]);
      k_at.advance();

      const bool new_chunk = block * kBlockKeys == chunk_end;
      MergeWeights weights[2];
      if (new_chunk) close_sums(weights);
      float next_decay[2];
      weigh(block, next_decay);

      gpu::wgmma_wait<0>();
      gpu::wgmma_hold(part);
      release(&shared.v_empty[v_at.stage]);
      v_at.advance();
      add_part();
      if (new_chunk) {
        close_values(weights);
        if (!folds) leave_state();
        chunk_end = chunk_begin(++chunk + 1);
      }
      decay[0] = next_decay[0], decay[1] = next_decay[1];
      pack_weights();
    }

    gpu::mbarrier_wait(&shared.v_full[v_at.stage], v_at.round);
    gpu::wgmma_hold(part);
    gpu::wgmma_fence();
    multiply_values<Tile>(p, shared.v[v_at.stage], part);
    gpu::wgmma_commit();
    MergeWeights weights[2];
    close_sums(weights);
    gpu::wgmma_wait<0>();
    gpu::wgmma_hold(part);
    release(&shared.v_empty[v_at.stage]);
    v_at.advance();
    add_part();
    close_values(weights);
    leave_state();
  }
}

// Barriers that the copy engine ends wait for one thread besides its bytes.
template <class Tile>
__device__ __forceinline__ void init_fp8_barriers(HopperFp8Shared<Tile>& shared) {
  for (int stage = 0; stage < Tile::kStages; ++stage) {
    gpu::mbarrier_init(&shared.load.k_full[stage], 1);
    gpu::mbarrier_init(&shared.load.v_full[stage], 1);
    gpu::mbarrier_init(&shared.load.k_empty[stage], 4 * Tile::kConsumers);  // warps
    gpu::mbarrier_init(&shared.load.v_empty[stage], kTransposingWarps);
  }
  for (int stage = 0; stage < Tile::kValueStages; ++stage) {
    gpu::mbarrier_init(&shared.v_full[stage], kTransposingWarps);
    gpu::mbarrier_init(&shared.v_empty[stage], 4 * Tile::kConsumers);
  }
  gpu::mbarrier_init_fence();
}

// T: of the queries in memory.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    hopper_fp8_main(const __grid_constant__ AttentionLaunch launch,
                    const __grid_constant__ gpu::TensorMap k_map,
                    const __grid_constant__ gpu::TensorMap v_map) {
  HopperFp8Shared<Tile>& shared = *gpu::dynamic_shared<HopperFp8Shared<Tile>>();
  if (threadIdx.x == 0) {
    init_fp8_barriers(shared);
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
    if (warp == 0) {
      load_tiles<Tile>(launch, k_map, v_map, shared.k, shared.raw_v, shared.load,
                       shared.load.v_full);
    } else {
      transpose_tiles(launch, shared);
    }
  } else {
    if constexpr (Tile::kConsumers > 1) gpu::setmaxnreg_inc<Tile::kConsumerRegisters>();
    consume_fp8<T>(launch, shared, warpgroup - 1);
  }
}

}  // namespace specdec::attention::hopper
