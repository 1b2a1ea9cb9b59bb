// What the threads of a block share while they look at a row of scores: sums over the block, bins
// and a list of its largest tokens.
#pragma once

#include <cstdint>

#include "accept/row_chunks.cuh"
#include "algo/law_cuts.h"
#include "algo/sampling_law.h"
#include "common/block_team.cuh"
#include "gpu/gpu.cuh"
#include "step/step_rows.cuh"

namespace specdec::cuda {

inline constexpr int kMaxLawThreads = 512;
inline constexpr int kCandidates = 2048;
inline constexpr int kBins = 256;
inline constexpr float kBinsPerUnit = 8.0f;  // the grid's smallest weight is e^-30.5: bin 244

// What the threads of a block share; mass_of_chunk follows it.
struct LawShared {
  Mass partial[2][kMaxLawThreads / 32][3];
  Candidate candidates[kCandidates];
  std::uint32_t bins[kBins];
  std::uint32_t num_candidates;  // written into the list so far
  std::uint32_t listed;          // in the bins before `bin_limit`
  std::int32_t bin_limit;
  TokenId token;
};

// As many warps as a row has chunks, within limits.
constexpr unsigned law_threads(std::int32_t vocab, int least) {
  const int wanted = (vocab + kChunk - 1) / kChunk * 32;
  return static_cast<unsigned>(wanted < least            ? least
                               : wanted > kMaxLawThreads ? kMaxLawThreads
                                                         : wanted);
}

// Shared memory of a BlockRow: LawShared and the masses of chunks.
constexpr std::size_t law_shared_bytes(std::int32_t vocab) {
  return sizeof(LawShared) + static_cast<std::size_t>((vocab + kChunk - 1) / kChunk) * sizeof(Mass);
}

// Sums over the block, for all its threads. *turn: which half of the shared memory was used last.
template <int kCount>
__device__ __forceinline__ void block_sum(LawShared* shared, int* turn, Mass (&x)[kCount]) {
  static_assert(kCount <= 3);
  Mass(&partial)[kMaxLawThreads / 32][3] = shared->partial[*turn];
  *turn ^= 1;  // the other half may still be read by a thread that is behind
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const Mass all = gpu::warp_sum(x[i]);
    if (lane_id() == 0) partial[threadIdx.x / 32][i] = all;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = 0;
#pragma unroll 4
    for (int w = 0; w < threads() / 32; ++w) x[i] += partial[w][i];
  }
}

// The sum over the lanes of a warp before this one.
template <class T>
__device__ __forceinline__ T exclusive_sum(T x) {
  return gpu::warp_scan(x) - x;
}

// The lane on whose part, `own` units from `before` on, the unit lies.
__device__ __forceinline__ int lane_of(Mass before, Mass own, Mass unit) {
  return __ffs(static_cast<int>(__ballot_sync(kAllLanes, before <= unit && unit < before + own))) -
         1;
}

// The counts of bins, each with those of all bins before it: divided over the lanes of a warp.
template <int kCount>
struct SummedBins {
  static constexpr int kMine = kCount / 32;
  std::uint32_t upto[kMine];

  struct First {
    int bins;
    std::uint32_t held;  // in them
  };

  __device__ __forceinline__ explicit SummedBins(const std::uint32_t* bins) {
    std::uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) upto[i] = sum += bins[lane_id() * kMine + i];
    const std::uint32_t before = exclusive_sum(sum);
#pragma unroll
    for (int i = 0; i < kMine; ++i) upto[i] += before;
  }

  // The first bins, as many as hold no more than `most` together. For all lanes.
  __device__ __forceinline__ First within(std::uint32_t most) const {
    std::uint32_t bins = 0, held = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (upto[i] > most) continue;
      ++bins;
      held = upto[i];
    }
    return {static_cast<int>(__reduce_add_sync(kAllLanes, bins)),
            __reduce_max_sync(kAllLanes, held)};
  }
};

// As many bins as the list has room for. The first warp's work.
__device__ __forceinline__ void limit_bins(LawShared* shared) {
  const auto first = SummedBins<kBins>(shared->bins).within(kCandidates);
  if (lane_id() == 0) {
    shared->bin_limit = first.bins;
    shared->listed = first.held;
  }
}

}  // namespace specdec::cuda
