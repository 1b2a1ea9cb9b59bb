// The largest score of each group of a row and of the row itself, by blocks that share it.
#pragma once

#include <cstdint>

#include "accept/row_chunks.cuh"
#include "algo/law_cuts.h"
#include "algo/sampling_law.h"
#include "gpu/gpu.cuh"
#include "step/row_best.cuh"

namespace specdec::cuda {

inline constexpr int kSearchWarps = 8;  // of a block
inline constexpr int kSearched = 4;     // chunks that a warp reads before it looks at the first

// The larger score, and of equal ones the smaller index, is the larger number; a NaN the largest.
inline constexpr std::uint64_t kNaNPacked = ~std::uint64_t{0};
__device__ __forceinline__ std::uint64_t packed(const Best& best) {
  if (best.index == kNaNBest) return kNaNPacked;
  if (best.index == kNoneBest) return 0;
  return std::uint64_t{order_key(best.value)} << 32 | ~static_cast<std::uint32_t>(best.index);
}

// The largest score itself: a NaN if there is one, -infinity if there is nothing else.
__device__ __forceinline__ float score_of(std::uint64_t packed_best) {
  return packed_best == 0 ? -INFINITY : score_of_key(static_cast<std::uint32_t>(packed_best >> 32));
}

// Looks at the largest scores of groups, in ascending order of their first tokens.
struct GroupSearch {
  float* groups;  // of the row; null: nobody wants them
  Best best = no_best();
  bool nan = false;

  __device__ __forceinline__ void offer(int chunk, std::int32_t first, float largest) {
    if (groups != nullptr) groups[chunk * 32 + lane_id()] = largest;
    if (largest > best.value) best = {largest, first};
  }
  __device__ __forceinline__ void take(int chunk, std::int32_t first,
                                       const float (&x)[kLaneElements]) {
    static_assert(kLaneElements == 8);
#pragma unroll
    for (int j = 0; j < kLaneElements; j += 2) {  // one comparison for two
      nan |= (x[j] != x[j]) | (x[j + 1] != x[j + 1]);
    }
    offer(chunk, first,
          fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])),
                fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7]))));
  }
};

// The largest score of each group of the chunks [begin, end), and of all of them, with the first
// token of its group: the calling thread's share.
template <class T>
__device__ __forceinline__ Best best_of_chunks(const RowChunks<T>& row, int begin, int end,
                                               float* groups) {
  GroupSearch search{groups};
  const int whole = row.aligned ? min(end, row.vocab / kChunk) : begin;
  int chunk = begin + static_cast<int>(threadIdx.x / 32);
#pragma unroll 1
  for (; chunk + (kSearched - 1) * kSearchWarps < whole; chunk += kSearched * kSearchWarps) {
    const std::int32_t first = row.first_of(chunk);
    const T* from = row.scores + first;
    float x[kSearched][kLaneElements];
#pragma unroll
    for (int k = 0; k < kSearched; ++k) load_floats(from + k * kSearchWarps * kChunk, true, x[k]);
#pragma unroll
    for (int k = 0; k < kSearched; ++k) {
      search.take(chunk + k * kSearchWarps, first + k * kSearchWarps * kChunk, x[k]);
    }
  }
#pragma unroll 1
  for (; chunk < whole; chunk += kSearchWarps) {
    float x[kLaneElements];
    load_floats(row.scores + row.first_of(chunk), true, x);
    search.take(chunk, row.first_of(chunk), x);
  }
  // What is not whole, or begins anywhere.
  row.template for_range<1>(
      max(begin, whole), end,
      [&](int at, std::int32_t first, int count, const float (&x)[kLaneElements]) {
        float largest = no_best().value;
#pragma unroll
        for (int j = 0; j < kLaneElements; ++j) {
          if (j >= count) break;
          search.nan |= x[j] != x[j];
          largest = fmaxf(largest, x[j]);
        }
        search.offer(at, first, largest);
      });
  return search.nan ? Best{0.0f, kNaNBest} : search.best;
}

// The row's largest score, the first of equal ones; kBadRow if it holds a NaN. Valid for all lanes
// of the warp that calls.
template <class T>
__device__ __forceinline__ TokenId best_token(const RowChunks<T>& row, std::uint64_t best) {
  if (best == kNaNPacked) return kBadRow;
  if (best == 0) return 0;
  const auto first = static_cast<std::int32_t>(~static_cast<std::uint32_t>(best));
  const auto key = static_cast<std::uint32_t>(best >> 32);
  const int lane = lane_id();
  const bool equal =
      lane < row.tokens_from(first) && order_key(widen(row.scores[first + lane])) == key;
  return first + __ffs(static_cast<int>(__ballot_sync(kAllLanes, equal))) - 1;
}

}  // namespace specdec::cuda
