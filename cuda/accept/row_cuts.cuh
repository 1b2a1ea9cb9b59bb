// What top_k and top_p leave of a row whose likeliest tokens are listed, and a draw from it: by a
// block, each of whose threads has tokens that follow one another. The cuts are those of
// algo/law_cuts.h; the bin in which one falls is known from the sums of all bins, and of the few
// tokens in it each looks at all others.
#pragma once

#include <cstdint>

#include "accept/row_lists.cuh"
#include "accept/row_weights.cuh"
#include "algo/law_cuts.h"
#include "algo/law_mass.h"
#include "gpu/gpu.cuh"

namespace specdec::cuda {

__device__ __forceinline__ void add_to_bin(ListShared* shared, int bin, Mass mass) {
  const auto low = static_cast<std::uint32_t>(mass);
  const std::uint32_t before = atomicAdd(&shared->mass.low[bin], low);
  const std::uint32_t carry = before + low < before ? 1u : 0u;
  atomicAdd(&shared->mass.high[bin], static_cast<std::uint32_t>(mass >> 32) + carry);
}

// The masses of bins, each with those of all bins before it: divided over the lanes of a warp.
struct SummedMasses {
  static constexpr int kMine = kFineBins / 32;
  Mass upto[kMine];

  __device__ __forceinline__ explicit SummedMasses(const ListShared& shared) {
    Mass sum = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int bin = lane_id() * kMine + i;
      upto[i] = sum += Mass{shared.mass.high[bin]} << 32 | shared.mass.low[bin];
    }
    const Mass before = exclusive_sum(sum);
#pragma unroll
    for (int i = 0; i < kMine; ++i) upto[i] += before;
  }
  __device__ __forceinline__ Mass total() const {
    return __shfl_sync(kAllLanes, upto[kMine - 1], 31);
  }
  // The bin that brings the mass to `wanted`, which all do; *before: the mass without it.
  __device__ __forceinline__ int reaching(Mass wanted, Mass* before) const {
    std::uint32_t bins = 0;
    Mass held = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (upto[i] >= wanted) continue;
      ++bins;
      held = upto[i];
    }
    const auto bin = static_cast<int>(__reduce_add_sync(kAllLanes, bins));
    held = __shfl_sync(kAllLanes, held, max(bin - 1, 0) / kMine);
    *before = bin > 0 ? held : 0;
    return bin;
  }
};

// The first of `count` tokens whose values reach `wanted`, in the order of cuts: into shared->cut.
// Keeps all of the last one's key, or by_id no more than are needed. A thread for each token; a
// barrier has to follow.
__device__ __forceinline__ void cut_edge(ListShared* shared, std::uint32_t count, Mass wanted,
                                         bool by_id) {
  if (threadIdx.x >= count) return;
  const EdgeToken own = shared->edge[threadIdx.x];
  Mass above = 0;
  std::uint32_t equal = 0, earlier = 0;
#pragma unroll 4
  for (std::uint32_t i = 0; i < count; ++i) {
    const EdgeToken other = shared->edge[i];
    above += other.key > own.key ? other.value : 0;
    equal += other.key == own.key ? 1 : 0;
    earlier += other.key == own.key && other.id < own.id ? 1 : 0;
  }
  if (above >= wanted || above + equal * own.value < wanted) return;
  const Mass ties = (wanted - above + own.value - 1) / own.value;
  if (earlier + 1 != ties) return;
  shared->cut = {own.key, by_id && ties < equal ? own.id : INT32_MAX, false,
                 above + ties * own.value};
}

enum class ListDraw {
  kDrawn,
  kCrowded,  // more tokens in one bin than there are threads, or of a bin that is not known
  kBeyond    // the cut lies behind the list
};

// Cuts the list of made.listed tokens in shared->law.candidates by the law, and draws from what is
// left by u. total: the row's mass, where top_p alone cuts. What list_row() and clear_masses() left
// is in the shared memory.
__device__ __forceinline__ ListDraw draw_listed(const ListMade& made, const RowWeights& weights,
                                                const SamplingLaw& law, Mass total, double u,
                                                ListShared* shared, TokenId* drawn,
                                                LawCut* drawn_from) {
  Candidate* list = shared->law.candidates;
  const auto [first, last] = ListPart(made.listed);
  const RowBins bins(weights, made.finer);
  LawCut cut;
  if (law.top_k > 0) {
    if (made.cut_bin < 0 || shared->num_edge[0] > kRowThreads) return ListDraw::kCrowded;
    cut_edge(shared, shared->num_edge[0], made.rank, false);
    __syncthreads();
    cut = shared->cut;
  }
  Mass sum = 0;
#pragma unroll 1
  for (std::uint32_t i = first; i < last; ++i) {
    const float score = score_of_key(list[i].key);
    const float weight = cut.keeps(list[i].key, list[i].id) ? weights.of(score) : 0.0f;
    list[i].weight = weight;
    sum += mass_of(weight);
    if (law.top_p < 1.0f && weight > 0.0f) {
      add_to_bin(shared, bins.of(score, kFineBins - 1), mass_of(weight));
    }
  }
  if (law.top_p < 1.0f) {
    __syncthreads();
    const SummedMasses sums(*shared);
    // After top_k top_p is a share of what it left.
    const Mass wanted = wanted_mass(law.top_p, law.top_k > 0 ? sums.total() : total);
    if (sums.total() < wanted) return ListDraw::kBeyond;
    Mass before;
    const int bin = sums.reaching(wanted, &before);
#pragma unroll 1
    for (std::uint32_t i = first; i < last; ++i) {
      const Candidate c = list[i];
      if (c.weight <= 0.0f || bins.of(score_of_key(c.key), kFineBins - 1) != bin) continue;
      const std::uint32_t slot = atomicAdd(&shared->num_edge[1], 1u);
      if (slot < kRowThreads) shared->edge[slot] = {c.key, c.id, mass_of(c.weight)};
    }
    __syncthreads();
    if (shared->num_edge[1] > kRowThreads) return ListDraw::kCrowded;
    cut_edge(shared, shared->num_edge[1], wanted - before, true);
    __syncthreads();
    cut = shared->cut;
    sum = 0;
#pragma unroll 1
    for (std::uint32_t i = first; i < last; ++i) {
      if (!cut.keeps(list[i].key, list[i].id)) list[i].weight = 0.0f;
      sum += mass_of(list[i].weight);
    }
  }
  Mass all = 0;
  Mass before = before_in_block(sum, shared->mass_of_warp, &all);
  const Mass unit = drawn_unit(u, all);
  if (before <= unit && unit < before + sum) {
    std::uint32_t i = first;
    for (; unit - before >= mass_of(list[i].weight); ++i) before += mass_of(list[i].weight);
    *drawn = list[i].id;
  }
  if (threadIdx.x == 0) *drawn_from = {cut.key_floor, cut.id_floor, false, all};
  return ListDraw::kDrawn;
}

}  // namespace specdec::cuda
