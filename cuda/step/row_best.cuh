// The largest score of a row: the first index wins a tie, so how a row is divided does not show.
#pragma once

#include <cstdint>

#include "gpu/gpu.cuh"
#include "kv/elements.cuh"
#include "step/step_rows.cuh"

namespace specdec::cuda {

inline constexpr std::int32_t kNoneBest = INT32_MAX;  // nothing above -infinity so far
inline constexpr std::int32_t kNaNBest = -1;

struct Best {
  float value;
  std::int32_t index;  // kNoneBest, kNaNBest
};

__device__ __forceinline__ Best no_best() { return {__int_as_float(0xff800000), kNoneBest}; }

__device__ __forceinline__ Best better(const Best& a, const Best& b) {
  if (a.index == kNaNBest || b.index == kNaNBest) return {0.0f, kNaNBest};
  const bool second = b.value > a.value || (b.value == a.value && b.index < a.index);
  return second ? b : a;
}

// Each thread offers elements in ascending order of index.
__device__ __forceinline__ void offer(Best& best, bool& nan, float value, std::int32_t index) {
  nan |= value != value;
  if (value > best.value) best = {value, index};
}

__device__ __forceinline__ Best best_of_warp(Best best) {
#pragma unroll
  for (int delta = 16; delta > 0; delta /= 2) {
    const Best other = {__shfl_xor_sync(kAllLanes, best.value, delta),
                        __shfl_xor_sync(kAllLanes, best.index, delta)};
    best = better(best, other);
  }
  return best;
}

// The maximum of a whole row; a row of nothing but -infinity has its first at 0.
__device__ __forceinline__ TokenId id_of(const Best& best) {
  return best.index == kNoneBest ? 0 : best.index;
}

// The calling thread's best of scores[begin, end), divided over kThreads threads: up to the first
// 16-byte boundary one by one, then vectors, then the rest one by one.
template <int kThreads, class T>
__device__ __forceinline__ Best best_of_thread(const T* scores, int begin, int end) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  const int thread = static_cast<int>(threadIdx.x);
  const int misaligned =
      static_cast<int>(reinterpret_cast<std::uintptr_t>(scores + begin) % 16 / sizeof(T));
  const int aligned = min(end, begin + (kVector - misaligned) % kVector);
  const int vectors = (end - aligned) / kVector;

  Best best = no_best();
  bool nan = false;
  if (begin + thread < aligned) offer(best, nan, widen(scores[begin + thread]), begin + thread);
#pragma unroll 4
  for (int i = thread; i < vectors; i += kThreads) {
    const int at = aligned + i * kVector;
    float x[kVector];
    load_floats(scores + at, true, x);
#pragma unroll
    for (int j = 0; j < kVector; ++j) offer(best, nan, x[j], at + j);
  }
  const int rest = aligned + vectors * kVector + thread;
  if (rest < end) offer(best, nan, widen(scores[rest]), rest);
  if (nan) best = {0.0f, kNaNBest};
  return best;
}

// The best of all threads, valid for thread 0. `shared`: [kThreads / 32].
template <int kThreads>
__device__ __forceinline__ Best best_of_block(Best best, Best* shared) {
  best = best_of_warp(best);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) best = better(best, shared[w]);
  }
  return best;
}

}  // namespace specdec::cuda
