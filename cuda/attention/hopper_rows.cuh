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

// What one row sees, where all lanes of its warp can read it.
struct alignas(16) RowView : RowSlots {};
static_assert(sizeof(RowView) == kRowViewBytes);

// The slots that all 16 rows of a warp see.
struct CommonSlots {
  std::int32_t begin, end;
};

// Looks up the rows `warp_row`.. of the warpgroup into views[16].
__device__ __forceinline__ CommonSlots view_rows(const AttentionLaunch& launch, const JobRows& rows,
                                                 int warp_row, RowView* views) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  RowView view = {{0, INT32_MAX, {}}};  // rows that do not exist may see anything
  __syncwarp();
  if (lane < 16) {
    if (rows.exists(warp_row + lane, launch.group)) {
      const std::int32_t token = (rows.first_row + warp_row + lane) / launch.group;
      view = {row_slots(launch, rows.request, token)};
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
    const std::uint64_t visible =
        visible_slots(views[lane / 4 + 8 * row], kv_len, launch.call.sink_tokens, first_slot) >>
        (2 * (lane % 4));
#pragma unroll
    for (int n = 0; n < kBlockKeys / 8; ++n) {
      if (!(visible >> (8 * n) & 1)) s[4 * n + 2 * row] = empty_max();
      if (!(visible >> (8 * n + 1) & 1)) s[4 * n + 2 * row + 1] = empty_max();
    }
  }
}

}  // namespace specdec::attention::hopper
