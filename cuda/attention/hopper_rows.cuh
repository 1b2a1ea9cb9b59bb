// What a consumer warp of the Hopper family's kernel knows about its 16 rows: which keys they see,
// their scores' softmax.
#pragma once

#include <cstdint>

#include "attention/hopper_tile.h"
#include "attention/rows.cuh"
#include "attention/softmax.cuh"
#include "attention/spec_attention.h"
#include "gpu/hopper.cuh"

namespace specdec::attention::hopper {

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
  return __any_sync(kAllLanes, moved) != 0;
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
  std::int32_t begin, end;
  std::int16_t tree_begin, tree_sinks;
  std::int32_t mask_row;  // of the step; -1: no tree

  __device__ __forceinline__ RowSlots slots() const {
    return {begin, end, tree_begin, tree_sinks, mask_row >= 0};
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
  RowView view = {0, INT32_MAX, 0, 0, -1};  // rows that do not exist may see anything
  __syncwarp();
  if (lane < 16) {
    if (rows.exists(warp_row + lane, launch.group)) {
      const std::int32_t token = (rows.first_row + warp_row + lane) / launch.group;
      const RowSlots slots = row_slots(launch, rows.request, token);
      view = {slots.begin, slots.end, static_cast<std::int16_t>(slots.tree_begin),
              static_cast<std::int16_t>(slots.tree_sinks),
              slots.tree ? rows.request.first_row + token : -1};
    }
    views[lane] = view;
  }
  __syncwarp();
  return {__reduce_max_sync(kAllLanes, view.begin), __reduce_min_sync(kAllLanes, view.end)};
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
        visible_slots(view.slots(), mask, kv_len, launch.call.sink_tokens, first_slot) >>
        (2 * (lane % 4));
#pragma unroll
    for (int n = 0; n < kBlockKeys / 8; ++n) {
      if (!(visible >> (8 * n) & 1)) s[4 * n + 2 * row] = empty_max();
      if (!(visible >> (8 * n + 1) & 1)) s[4 * n + 2 * row + 1] = empty_max();
    }
  }
}

}  // namespace specdec::attention::hopper
