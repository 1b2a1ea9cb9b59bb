// A row of scores in the chunks in which the warps of a block read it.
#pragma once

#include <cstdint>

#include "backend/accept_ops.h"
#include "gpu/gpu.cuh"
#include "kv/elements.cuh"
#include "step/step_rows.cuh"

namespace specdec::cuda {

inline constexpr int kChunk = kLawChunk;  // tokens that a warp reads at once
static_assert(kChunk == 32 * kLaneElements);
inline constexpr int kInFlight = 2;  // of those before it looks at the first

__device__ __forceinline__ int threads() { return static_cast<int>(blockDim.x); }

template <class T>
struct RowChunks {
  std::int32_t vocab;
  int count;
  const T* scores = nullptr;
  bool aligned = false;  // to 16 bytes

  __device__ explicit RowChunks(std::int32_t columns)
      : vocab(columns), count((columns + kChunk - 1) / kChunk) {}

  __device__ __forceinline__ void point_at(const T* row) {
    scores = row;
    aligned = reinterpret_cast<std::uintptr_t>(row) % 16 == 0;
  }

  // visit(chunk, first token, tokens, scores) for the calling lane's part of each of the warp's
  // chunks; every lane is called for every chunk, behind the row with 0 tokens or fewer.
  template <int kAhead = kInFlight, class Visit>
  __device__ __forceinline__ void for_each(Visit visit) const {
    for_range<kAhead>(0, count, visit);
  }
  // The same for the chunks [begin, end).
  template <int kAhead = kInFlight, class Visit>
  __device__ __forceinline__ void for_range(int begin, int end, Visit visit) const {
#pragma unroll 1
    for (int base = begin + static_cast<int>(threadIdx.x / 32); base < end;
         base += threads() / 32 * kAhead) {
      float x[kAhead][kLaneElements];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const std::int32_t first = first_of(base + k * (threads() / 32));
        load(first, tokens_from(first), x[k]);
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int chunk = base + k * (threads() / 32);
        if (chunk >= end) break;
        const std::int32_t first = first_of(chunk);
        visit(chunk, first, tokens_from(first), x[k]);
      }
    }
  }
  // behind: what stands in place of tokens behind the row.
  __device__ __forceinline__ void load(std::int32_t first, int tokens, float (&x)[kLaneElements],
                                       float behind = 0.0f) const {
    if (tokens == kLaneElements) {
      load_floats(scores + first, aligned, x);
    } else {
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) x[j] = j < tokens ? widen(scores[first + j]) : behind;
    }
  }
  __device__ __forceinline__ std::int32_t first_of(int chunk) const {
    return chunk * kChunk + lane_id() * kLaneElements;
  }
  // Tokens of the lane's part that begins there; below 0 behind the row. A bound at 0 would be one
  // instruction with the other (VIMNMX.RELU), whose predicate ptxas 13.0 takes for `== 8`: it is
  // set at 0 as well (scripts/cuda_check/refused.py).
  __device__ __forceinline__ int tokens_from(std::int32_t first) const {
    return min(vocab - first, kLaneElements);
  }
};

}  // namespace specdec::cuda
