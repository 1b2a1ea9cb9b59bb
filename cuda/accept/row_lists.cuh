// The likeliest tokens of a row, as many as a list holds, found by the largest score of every
// eight: one block's work, which reads an eighth of the row and then the eights that matter.
#pragma once

#include <cstdint>

#include "accept/law_shared.cuh"
#include "accept/row_chunks.cuh"
#include "accept/row_weights.cuh"
#include "gpu/gpu.cuh"

namespace specdec::cuda {

// No token from this bin on has any weight: to the grid e^-30.6 is 0.
inline constexpr int kUsedBins = 245;
static_assert(kUsedBins < kBins && kBinsPerUnit == 8.0f);

struct ListShared {
  LawShared law;
  std::int32_t groups[kCandidates];  // those that may hold a listed token
  std::uint32_t num_groups;
};

__device__ __forceinline__ int used_bin_of(const RowWeights& weights, float score) {
  const float z = law_exponent(score, weights.best, weights.inverse);
  return static_cast<int>(fminf(-z * kBinsPerUnit, static_cast<float>(kUsedBins)));
}

// The bins that hold as many as the list has room for; empties them. For all threads.
__device__ __forceinline__ int take_limit(LawShared* shared) {
  __syncthreads();
  if (threadIdx.x < 32) limit_bins(shared);
  __syncthreads();
  const int limit = min(shared->bin_limit, kUsedBins);
  for (int i = static_cast<int>(threadIdx.x); i < kBins; i += threads()) shared->bins[i] = 0;
  __syncthreads();
  return limit;
}

// Reads in flight of a thread that walks a row's groups, or those that were kept.
inline constexpr int kGroupReads = 4, kKeptReads = 2;

// visit(group, bin) of each group's largest score, `groups` of them: a multiple of 32.
template <class Visit>
__device__ __forceinline__ void for_groups(const float* group_best, int groups,
                                           const RowWeights& weights, Visit visit) {
  const int stride = threads() * kLaneElements;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) * kLaneElements; first < groups;
       first += kGroupReads * stride) {
    float best[kGroupReads][kLaneElements];
#pragma unroll
    for (int k = 0; k < kGroupReads; ++k) {
      if (first + k * stride < groups) load_floats(group_best + first + k * stride, true, best[k]);
    }
#pragma unroll
    for (int k = 0; k < kGroupReads; ++k) {
      if (first + k * stride >= groups) break;
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        visit(first + k * stride + j, used_bin_of(weights, best[k][j]));
      }
    }
  }
}

// visit(score, bin, token) of each token of the groups that were kept.
template <class T, class Visit>
__device__ __forceinline__ void for_kept(const RowChunks<T>& row, const ListShared& shared,
                                         const RowWeights& weights, Visit visit) {
  const int count = static_cast<int>(shared.num_groups);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kKeptReads * threads()) {
    std::int32_t first[kKeptReads];
    float x[kKeptReads][kLaneElements];
#pragma unroll
    for (int k = 0; k < kKeptReads; ++k) {
      const int at = i + k * threads();
      first[k] = at < count ? shared.groups[at] * kLaneElements : row.vocab;
      row.load(first[k], row.tokens_from(first[k]), x[k]);
    }
#pragma unroll
    for (int k = 0; k < kKeptReads; ++k) {
      const int tokens = row.tokens_from(first[k]);
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        if (j < tokens) visit(x[k][j], used_bin_of(weights, x[k][j]), first[k] + j);
      }
    }
  }
}

// Lists the tokens of the first bins in shared->law.candidates, law.listed of them. group_best: the
// largest score of each kLaneElements tokens, [32 row.count]. Returns whether no other token of the
// row has any weight. What was in the shared memory may be overwritten.
template <class T>
__device__ __forceinline__ bool list_row(const RowChunks<T>& row, const float* group_best,
                                         const RowWeights& weights, ListShared* shared) {
  LawShared& law = shared->law;
  for (int i = static_cast<int>(threadIdx.x); i < kBins; i += threads()) law.bins[i] = 0;
  if (threadIdx.x == 0) law.num_candidates = shared->num_groups = 0;
  __syncthreads();
  // Each group has at least one token in its bin or before: what follows the bins that hold as many
  // groups as the list has room for tokens is not listed.
  for_groups(group_best, row.count * 32, weights, [&](int, int bin) {
    if (bin < kUsedBins) atomicAdd(&law.bins[bin], 1u);
  });
  const int reach = take_limit(&law);
  for_groups(group_best, row.count * 32, weights, [&](int group, int bin) {
    if (bin < reach) shared->groups[atomicAdd(&shared->num_groups, 1u)] = group;
  });
  __syncthreads();
  for_kept(row, *shared, weights, [&](float, int bin, std::int32_t) {
    if (bin < reach) atomicAdd(&law.bins[bin], 1u);
  });
  const int limit = min(take_limit(&law), reach);
  for_kept(row, *shared, weights, [&](float score, int bin, std::int32_t id) {
    if (bin >= limit) return;
    law.candidates[atomicAdd(&law.num_candidates, 1u)] = {order_key(score), 0.0f, id};
  });
  __syncthreads();
  for (std::uint32_t i = threadIdx.x; i < law.listed; i += blockDim.x) {
    law.candidates[i].weight = weights.of(score_of_key(law.candidates[i].key));
  }
  __syncthreads();
  return limit == kUsedBins;
}

}  // namespace specdec::cuda
