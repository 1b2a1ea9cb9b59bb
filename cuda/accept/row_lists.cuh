// The likeliest tokens of a row, as many as a list holds, in ascending order, found by the largest
// score of every eight: one block's work, which reads an eighth of the row and then the eights that
// matter.
//
// Tokens are counted in bins of (largest - score) / temperature, as wide as is fine enough for the
// tokens that matter: a token's bin follows from its score alone and falls with it. Whatever all
// threads have to know of the bins every warp finds for itself, which costs less than a barrier.
#pragma once

#include <cstdint>

#include "accept/law_shared.cuh"
#include "accept/row_chunks.cuh"
#include "accept/row_weights.cuh"
#include "gpu/gpu.cuh"

namespace specdec::cuda {

inline constexpr int kRowThreads = 256, kRowWarps = kRowThreads / 32;

// No token from this bin on has any weight: to the grid e^-30.6 is 0. All before the other have,
// unless min_p takes it: e^-30.375 is more than half a unit, by far more than a weight's error.
inline constexpr int kUsedBins = 245, kSureBins = 243;
static_assert(kUsedBins < kBins && kBinsPerUnit == 8.0f);
inline constexpr int kFineBins = 512;

// Vectors of groups' largest scores, and groups, that a thread reads before it looks at the first.
inline constexpr int kGroupReads = 8, kKeptReads = 4;
inline constexpr int kBatchGroups = kKeptReads * kRowThreads;  // that a block reads at once
inline constexpr int kGroupStep = 32 * kLaneElements;          // groups of a warp's vectors
static_assert(kKeptReads * kLaneElements <= 64, "a bit for each of a thread's tokens");
static_assert(kRowThreads * kLaneElements == kCandidates, "room for the tokens of fewer groups");

// A token of the bin in which a cut falls.
struct EdgeToken {
  std::uint32_t key;
  TokenId id;
  Mass value;  // its mass; 1 where tokens are counted
};

struct ListShared {
  LawShared law;
  std::int32_t groups[kCandidates];  // those that may hold a listed token
  std::uint32_t fine[kFineBins];     // tokens
  union {
    std::uint32_t kept[kMaxLawTokens / kLaneElements / 32];  // a bit for each group
    struct {
      std::uint32_t low[kFineBins], high[kFineBins];
    } mass;  // of bins, in halves
  };
  EdgeToken edge[kRowThreads];
  std::uint32_t num_edge[2];  // of top_k, of top_p; more than fit are counted, and not there
  LawCut cut;
  std::uint32_t kept_of_warp[kRowWarps], listed_of_warp[kRowWarps];
  Mass mass_of_warp[kRowWarps];
};

// What is known of a list beside its tokens.
struct ListMade {
  std::uint32_t listed;
  std::int32_t finer;    // bins are divided by 2^finer
  std::int32_t cut_bin;  // in which the last token of top_k lies; -1: not known
  std::uint32_t rank;    // of that token within it, from 1
  bool all;              // no other token of the row has any weight
};

// The bins of a row.
struct RowBins {
  float best, scale;

  __device__ __forceinline__ RowBins(const RowWeights& weights, int finer)
      : best(weights.best),
        scale(fminf(weights.inverse * kBinsPerUnit, kLargestFloat)),
        finer_(static_cast<float>(1 << finer)) {}
  // How many bins a score lies behind the largest one: its bin is the whole part. A product with a
  // power of two is exact, so finer bins divide the others.
  __device__ __forceinline__ float behind(float score) const {
    return (best - score) * scale * finer_;
  }
  __device__ __forceinline__ int of(float score, int most) const {
    return static_cast<int>(fminf(behind(score), static_cast<float>(most)));
  }

 private:
  float finer_;
};

// How many of the first bins are sure to hold no token that min_p or the grid leaves without
// weight.
__device__ __forceinline__ int sure_bins(const RowWeights& weights) {
  if (weights.inverse > kLargestFloat / kBinsPerUnit) return 0;
  if (weights.min_p <= 0.0f) return kSureBins;
  return min(kSureBins, static_cast<int>(-logf(weights.min_p) * kBinsPerUnit) - 1);
}

// The sum over the threads of the block before this one; *all: over all of them. Has one barrier.
template <class Int>
__device__ __forceinline__ Int before_in_block(Int own, Int (&of_warp)[kRowWarps], Int* all) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  Int before = exclusive_sum(own);
  if (lane_id() == 31) of_warp[warp] = before + own;
  __syncthreads();
  *all = 0;
#pragma unroll
  for (int w = 0; w < kRowWarps; ++w) {
    if (w == warp) before += *all;
    *all += of_warp[w];
  }
  return before;
}

// visit(group, behind) for the groups [begin, end) that a warp looks at: the first of eight that
// follow one another, and how many bins each lies behind the row's largest score.
template <class Visit>
__device__ __forceinline__ void for_groups(const float* group_best, int begin, int end,
                                           const RowBins& bins, Visit visit) {
#pragma unroll 1
  for (int at = begin; at < end; at += kGroupReads * kGroupStep) {
    float best[kGroupReads][kLaneElements];
#pragma unroll
    for (int k = 0; k < kGroupReads; ++k) {
      const int group = at + k * kGroupStep + lane_id() * kLaneElements;
      if (group < end) {
        load_floats(group_best + group, true, best[k]);
      } else {
#pragma unroll
        for (int j = 0; j < kLaneElements; ++j) best[k][j] = -INFINITY;
      }
    }
#pragma unroll
    for (int k = 0; k < kGroupReads; ++k) {
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) best[k][j] = bins.behind(best[k][j]);
      visit(at + k * kGroupStep + lane_id() * kLaneElements, best[k]);
    }
  }
}

// Writes the groups whose bits are set into shared->groups, in ascending order; their number. Each
// warp has the words [begin, end).
__device__ __forceinline__ int write_groups(int begin, int end, ListShared* shared) {
  const int each = (end - begin + 31) / 32;
  const int first = begin + lane_id() * each, last = min(first + each, end);
  std::uint32_t mine = 0, all = 0;
  for (int i = first; i < last; ++i) {
    mine += static_cast<std::uint32_t>(__popc(shared->kept[i]));
  }
  std::uint32_t at = before_in_block(mine, shared->kept_of_warp, &all);
  for (int i = first; i < last; ++i) {
    for (std::uint32_t bits = shared->kept[i]; bits != 0; bits &= bits - 1) {
      shared->groups[at++] = 32 * i + __ffs(static_cast<int>(bits)) - 1;
    }
  }
  __syncthreads();
  return static_cast<int>(all);
}

// A thread's groups of at most kBatchGroups, which follow one another: all their scores, -infinity
// behind the row.
template <class T>
struct KeptGroups {
  const std::int32_t* groups;  // the thread's first
  int count;
  float score[kKeptReads][kLaneElements];

  __device__ __forceinline__ KeptGroups(const RowChunks<T>& row, const std::int32_t* batch,
                                        int size) {
    const int mine = (size + kRowThreads - 1) / kRowThreads;
    const int first = min(static_cast<int>(threadIdx.x) * mine, size);
    groups = batch + first;
    count = min(mine, size - first);
#pragma unroll
    for (int k = 0; k < kKeptReads; ++k) {
      const std::int32_t from = k < count ? groups[k] * kLaneElements : row.vocab;
      row.load(from, row.tokens_from(from), score[k], -INFINITY);
    }
  }
  // A bit for each token of the first bins.
  __device__ __forceinline__ std::uint64_t within(const RowBins& bins, int reach) const {
    const auto end = static_cast<float>(reach);
    std::uint64_t bits = 0;
#pragma unroll
    for (int k = 0; k < kKeptReads; ++k) {
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        if (bins.behind(score[k][j]) < end) bits |= std::uint64_t{1} << (k * kLaneElements + j);
      }
    }
    return bits;
  }
  // The tokens whose bits are set, with their scores in place of weights.
  __device__ __forceinline__ void write(std::uint64_t bits, Candidate* to) const {
#pragma unroll
    for (int k = 0; k < kKeptReads; ++k) {
      const std::int32_t from = k < count ? groups[k] * kLaneElements : 0;
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        if ((bits >> (k * kLaneElements + j) & 1) == 0) continue;
        to->weight = score[k][j];
        to->id = from + j;
        ++to;
      }
    }
  }
};

// Before list_row(); a barrier has to follow.
__device__ __forceinline__ void clear_list(ListShared* shared) {
  for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kRowThreads) shared->law.bins[i] = 0;
  for (int i = static_cast<int>(threadIdx.x); i < kFineBins; i += kRowThreads) shared->fine[i] = 0;
  if (threadIdx.x < 2) shared->num_edge[threadIdx.x] = 0;
}

__device__ __forceinline__ void clear_masses(ListShared* shared) {
  for (int i = static_cast<int>(threadIdx.x); i < kFineBins; i += kRowThreads) {
    shared->mass.low[i] = shared->mass.high[i] = 0;
  }
}

// A thread's part of a list, whose tokens follow one another.
struct ListPart {
  std::uint32_t first, last;

  __device__ __forceinline__ explicit ListPart(std::uint32_t listed) {
    const std::uint32_t each = (listed + kRowThreads - 1) / kRowThreads;
    first = threadIdx.x * each;
    last = min(first + each, listed);
  }
};

// Lists the tokens of the first bins in shared->law.candidates, in ascending order and without
// their weights: as many as there is room for, or no more than top_k needs; then the tokens of the
// bin that it cuts are in shared->edge. group_best: the largest score of each kLaneElements tokens,
// [32 row.count].
template <class T>
__device__ __forceinline__ ListMade list_row(const RowChunks<T>& row, const float* group_best,
                                             const RowWeights& weights, std::int32_t top_k,
                                             ListShared* shared) {
  const int warp = static_cast<int>(threadIdx.x / 32), groups = row.count * 32;
  const int each = (groups + kGroupStep * kRowWarps - 1) / (kGroupStep * kRowWarps) * kGroupStep;
  const int begin = min(warp * each, groups), end = min(begin + each, groups);
  const RowBins coarse(weights, 0);
  for_groups(group_best, begin, end, coarse, [&](int, const float (&behind)[kLaneElements]) {
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) {
      if (behind[j] < kUsedBins) atomicAdd(&shared->law.bins[static_cast<int>(behind[j])], 1u);
    }
  });
  __syncthreads();

  // Each group has at least one token in its bin or before. So what follows the bins that hold as
  // many groups as the list has room for tokens is not listed, and the first k tokens are in the
  // bins that hold k groups. Some groups have several tokens: without k there is room for these.
  std::uint32_t most = top_k > 0 ? kCandidates : kCandidates - kCandidates / 8;
  const SummedBins<kBins> groups_in(shared->law.bins);
  int reach = min(groups_in.within(most).bins, kUsedBins);
  if (top_k > 0) {
    reach = min(reach, groups_in.within(static_cast<std::uint32_t>(top_k) - 1).bins + 1);
  }
  for_groups(group_best, begin, end, coarse, [&](int group, const float (&behind)[kLaneElements]) {
    std::uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) {
      bits |= behind[j] < static_cast<float>(reach) ? 1u << j : 0u;
    }
    if (group < end) {
      reinterpret_cast<std::uint8_t*>(shared->kept)[group / 8] = static_cast<std::uint8_t>(bits);
    }
  });
  __syncwarp();
  const int count = write_groups(begin / 32, end / 32, shared);

  ListMade made{0, 0, -1, 0, false};
#pragma unroll 1
  for (int done = 0; done < count;) {
    const KeptGroups<T> kept(row, shared->groups + done, min(count - done, kBatchGroups));
    const std::uint64_t own = kept.within(coarse, reach);
    std::uint32_t all = 0;
    const std::uint32_t at =
        made.listed +
        before_in_block(static_cast<std::uint32_t>(__popcll(own)), shared->listed_of_warp, &all);
    made.listed += all;
    done += kBatchGroups;
    if (made.listed <= kCandidates) {
      kept.write(own, shared->law.candidates + at);
    } else {
      // More tokens than there is room for: those of fewer groups. Of an eighth they always fit.
      most = min(most, static_cast<std::uint32_t>(count));
      most -= most / 4;
      reach = min(reach, SummedBins<kBins>(shared->law.bins).within(most).bins);
      made.listed = 0;
      done = 0;
    }
    __syncthreads();
  }
  clear_masses(shared);  // in place of the bits
  made.all = reach == kUsedBins;
  while (max(reach, 1) << (made.finer + 1) <= kFineBins) ++made.finer;

  const RowBins bins(weights, made.finer);
  const ListPart mine(made.listed);
  const bool cuts =
      top_k > 0 && static_cast<std::uint32_t>(top_k) <= made.listed && reach <= sure_bins(weights);
#pragma unroll 1
  for (std::uint32_t i = mine.first; i < mine.last; ++i) {
    Candidate& c = shared->law.candidates[i];
    c.key = order_key(c.weight);
    if (cuts) atomicAdd(&shared->fine[bins.of(c.weight, kFineBins - 1)], 1u);
  }
  __syncthreads();
  if (!cuts) return made;

  const auto rank = static_cast<std::uint32_t>(top_k);
  const auto before = SummedBins<kFineBins>(shared->fine).within(rank - 1);
  made.cut_bin = before.bins;
  made.rank = rank - before.held;
#pragma unroll 1
  for (std::uint32_t i = mine.first; i < mine.last; ++i) {
    const Candidate c = shared->law.candidates[i];
    if (bins.of(c.weight, kFineBins - 1) != made.cut_bin) continue;
    const std::uint32_t slot = atomicAdd(&shared->num_edge[0], 1u);
    if (slot < kRowThreads) shared->edge[slot] = {c.key, c.id, 1};
  }
  __syncthreads();
  return made;
}

}  // namespace specdec::cuda
