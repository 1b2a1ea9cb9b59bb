// What a consumer warp of the Hopper family's kernel knows about its 16 rows: their queries, which
// keys they see, their scores' softmax.
#pragma once

#include <cstdint>

#include "attention/elements.cuh"
#include "attention/hopper_tile.h"
#include "attention/rows.cuh"
#include "attention/softmax.cuh"
#include "attention/spec_attention.h"
#include "gpu/hopper.cuh"

namespace specdec::attention::hopper {

// The running reference of the exponents follows the greatest score only when it lags by more than
// this (in units of log2), a row's own affair. So a row's sums are rarely rescaled, and those of a
// warp's 16 rows often all stay as they are. P reaches 2^8, which both 16-bit types hold.
inline constexpr float kMaxLag = 8.0f;

// Scores of one block, row g (elements 0, 1 of four) and g + 8 (2, 3) of the warp's, columns
// 8 n + 2 t: as online_softmax() of softmax.cuh, but each row has a factor of its own, and its
// reference is the greatest score less `headroom`, unless that is at most `lag` more than the
// reference before. True if a row of the warp moved its reference: then sums of values must be
// multiplied by `decay`.
__device__ __forceinline__ bool lagging_softmax(float (&s)[kBlockKeys / 2],
                                                const float (&factor)[2], float lag, float headroom,
                                                float (&m)[2], float (&l)[2], float (&decay)[2]) {
  constexpr int kTiles = kBlockKeys / 8;
  bool moved = false;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float top = fmaxf(s[2 * row], s[2 * row + 1]);
#pragma unroll
    for (int n = 1; n < kTiles; ++n) {
      top = fmaxf(top, fmaxf(s[4 * n + 2 * row], s[4 * n + 2 * row + 1]));
    }
    top = gpu::quad_max(top) * factor[row] - headroom;
    const bool moves = top > m[row] + lag;
    const float now = moves ? top : m[row];
    const float base = exponent_base(now);
    decay[row] = moves ? gpu::exp2_approx(m[row] - base) : 1.0f;
    m[row] = now;
    moved = moved || moves;
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float& a = s[4 * n + 2 * row];
      float& b = s[4 * n + 2 * row + 1];
      a = gpu::exp2_approx(fmaf(a, factor[row], -base));
      b = gpu::exp2_approx(fmaf(b, factor[row], -base));
      even += a, odd += b;
    }
    l[row] = fmaf(l[row], decay[row], even + odd);
  }
  return __any_sync(kWarp, moved) != 0;
}

// The rows of one consumer warpgroup in a job.
struct JobRows {
  RequestView request;
  std::int32_t kv_head, first_row;  // of the warpgroup's 64, within the request

  __device__ __forceinline__ bool exists(std::int32_t row, std::int32_t group) const {
    return first_row + row < request.rows * group;
  }
};

// What one row sees, where all lanes of its warp can read it: RowSlots in one vector.
struct alignas(16) RowView {
  std::int32_t begin, end, tree_begin;
  std::int32_t mask_row;  // of the step; -1: no tree

  __device__ __forceinline__ RowSlots slots() const {
    return {begin, end, tree_begin, mask_row >= 0};
  }
};
static_assert(sizeof(RowView) == HopperTile<64, 1>::kRowBytes);

// The slots that all 16 rows of a warp see.
struct CommonSlots {
  std::int32_t begin, end;
};

// Looks up the rows `warp_row`.. of the warpgroup into views[16].
__device__ __forceinline__ CommonSlots view_rows(const AttentionLaunch& launch, const JobRows& rows,
                                                 int warp_row, RowView* views) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  RowView view = {0, INT32_MAX, 0, -1};  // rows that do not exist may see anything
  __syncwarp();
  if (lane < 16) {
    if (rows.exists(warp_row + lane, launch.group)) {
      const std::int32_t token = (rows.first_row + warp_row + lane) / launch.group;
      const RowSlots slots = row_slots(launch, rows.request, token);
      view = {slots.begin, slots.end, slots.tree_begin,
              slots.tree ? rows.request.first_row + token : -1};
    }
    views[lane] = view;
  }
  __syncwarp();
  return {__reduce_max_sync(kWarp, view.begin), __reduce_min_sync(kWarp, view.end)};
}

// Replaces the scores that a row may not see.
__device__ __forceinline__ void mask_scores(const AttentionLaunch& launch, std::int32_t kv_len,
                                            const RowView* views, std::int32_t first_slot,
                                            float (&s)[kBlockKeys / 2]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const RowView view = views[lane / 4 + 8 * row];
    const std::int64_t mask_row = max(view.mask_row, 0);  // without a tree it is not read
    const std::uint32_t* mask = launch.call.step.mask + mask_row * kMaskWords;
    const std::uint64_t visible =
        visible_slots(view.slots(), mask, kv_len, first_slot) >> (2 * (lane % 4));
#pragma unroll
    for (int n = 0; n < kBlockKeys / 8; ++n) {
      if (!(visible >> (8 * n) & 1)) s[4 * n + 2 * row] = empty_max();
      if (!(visible >> (8 * n + 1) & 1)) s[4 * n + 2 * row + 1] = empty_max();
    }
  }
}

// The queries of a warpgroup's rows as the A operand of S = Q K^T; zeros for rows that do not
// exist.
template <class T, class Tile, bool kInRegisters = Tile::kQueriesInRegisters>
class Queries;

template <class T, class Tile>
class Queries<T, Tile, true> {
 public:
  __device__ __forceinline__ Queries(HopperShared<Tile>&, int) {}

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
                   2 * (lane % 4);
#pragma unroll
      for (int step = 0; step < Tile::kDim / 16; ++step) {
        fragments_[step][half] =
            exists ? *reinterpret_cast<const std::uint32_t*>(q + 16 * step) : 0;
        fragments_[step][half + 2] =
            exists ? *reinterpret_cast<const std::uint32_t*>(q + 16 * step + 8) : 0;
      }
    }
  }

  // s = Q K^T for the block of keys in k.
  __device__ __forceinline__ void multiply(const unsigned char* k, float (&s)[kBlockKeys / 2]) {
#pragma unroll
    for (int step = 0; step < Tile::kDim / 16; ++step) {
      gpu::wgmma_rs_m64k16<T, kBlockKeys>(
          s, fragments_[step],
          gpu::wgmma_descriptor(k + step / 4 * Tile::kBoxBytes + step % 4 * 32, gpu::Swizzle::b128,
                                0, 1024),
          step > 0);
    }
  }

 private:
  std::uint32_t fragments_[Tile::kDim / 16][4];
};

// In shared memory: boxes of 64 rows x 64 columns, swizzled as the copy engine would.
template <class T, class Tile>
class Queries<T, Tile, false> {
 public:
  __device__ __forceinline__ Queries(HopperShared<Tile>& shared, int consumer)
      : tile_(shared.q + consumer * Tile::kTileBytes), barrier_(1 + consumer) {}

  __device__ __forceinline__ void load(const AttentionLaunch& launch, const JobRows& rows) {
    constexpr int kVectors = Tile::kDim / 8;  // of a row, 16 bytes each
    const SpecAttentionParams& call = launch.call;
    gpu::named_barrier_sync(barrier_, 128);  // all warps are done with the queries before
    for (int i = static_cast<int>(threadIdx.x % 128); i < 64 * kVectors; i += 128) {
      const std::int32_t row = i / kVectors, vector = i % kVectors;
      uint4 q = make_uint4(0, 0, 0, 0);
      if (rows.exists(row, launch.group)) {
        const std::int32_t token = (rows.first_row + row) / launch.group;
        const std::int32_t head =
            rows.kv_head * launch.group + (rows.first_row + row) % launch.group;
        q = *reinterpret_cast<const uint4*>(static_cast<const T*>(call.q) +
                                            (rows.request.first_row + token) * call.q_row_stride +
                                            head * Tile::kDim + 8 * vector);
      }
      reinterpret_cast<uint4*>(
          tile_)[vector / 8 * (Tile::kBoxBytes / 16) + row * 8 + ((vector ^ row) & 7)] = q;
    }
    gpu::fence_proxy_async();
    gpu::named_barrier_sync(barrier_, 128);
  }

  __device__ __forceinline__ void multiply(const unsigned char* k, float (&s)[kBlockKeys / 2]) {
#pragma unroll
    for (int step = 0; step < Tile::kDim / 16; ++step) {
      const int offset = step / 4 * Tile::kBoxBytes + step % 4 * 32;
      gpu::wgmma_m64k16<T, kBlockKeys>(
          s, gpu::wgmma_descriptor(tile_ + offset, gpu::Swizzle::b128, 0, 1024),
          gpu::wgmma_descriptor(k + offset, gpu::Swizzle::b128, 0, 1024), step > 0);
    }
  }

 private:
  unsigned char* tile_;
  int barrier_;
};

}  // namespace specdec::attention::hopper
