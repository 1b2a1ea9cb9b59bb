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

// The bins of the groups that a warp reads at once, four in a word; kUsedBins behind the last.
struct GroupBins {
  static constexpr int kStep = 32 * kLaneElements, kGroups = kGroupReads * kStep;
  std::uint32_t words[kGroupReads * 2];

  __device__ __forceinline__ void read(const float* group_best, int begin, int end,
                                       const RowBins& bins) {
    float best[kGroupReads][kLaneElements];
#pragma unroll
    for (int k = 0; k < kGroupReads; ++k) {
      const int at = begin + k * kStep + lane_id() * kLaneElements;
      if (at < end) {
        load_floats(group_best + at, true, best[k]);
      } else {
#pragma unroll
        for (int j = 0; j < kLaneElements; ++j) best[k][j] = -INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < kGroupReads * 2; ++i) {
      words[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[i] |= static_cast<std::uint32_t>(bins.of(best[i / 2][i % 2 * 4 + j], kUsedBins))
                    << 8 * j;
      }
    }
  }
  __device__ __forceinline__ int of(int k, int j) const {
    return static_cast<int>(words[2 * k + j / 4] >> j % 4 * 8 & 0xffu);
  }
};

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

// visit(score, token, place) for each token of the groups [first, last) of the list, of which there
// are no more than 8; place: of the token in all of them.
template <class T, class Visit>
__device__ __forceinline__ void for_kept(const RowChunks<T>& row, const std::int32_t* groups,
                                         int first, int last, Visit visit) {
#pragma unroll 1
  for (int i = first; i < last; i += kKeptReads) {
    std::int32_t token[kKeptReads];
    float x[kKeptReads][kLaneElements];
#pragma unroll
    for (int k = 0; k < kKeptReads; ++k) {
      token[k] = i + k < last ? groups[i + k] * kLaneElements : row.vocab;
      row.load(token[k], row.tokens_from(token[k]), x[k]);
    }
#pragma unroll
    for (int k = 0; k < kKeptReads; ++k) {
      const int tokens = row.tokens_from(token[k]);
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        if (j < tokens) visit(x[k][j], token[k] + j, (i - first + k) * kLaneElements + j);
      }
    }
  }
}
static_assert(kCandidates == 8 * kRowThreads && kLaneElements == 8, "a bit for each of its tokens");

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

// Lists the tokens of the first bins in shared->law.candidates, in ascending order and without
// their weights: as many as there is room for, or if top_k is known to cut there no more than it
// keeps; then the tokens of the bin that it cuts are in shared->edge. group_best: the largest score
// of each kLaneElements tokens, [32 row.count].
template <class T>
__device__ __forceinline__ ListMade list_row(const RowChunks<T>& row, const float* group_best,
                                             const RowWeights& weights, std::int32_t top_k,
                                             ListShared* shared) {
  const int warp = static_cast<int>(threadIdx.x / 32), groups = row.count * 32;
  const int each = (groups + GroupBins::kStep * kRowWarps - 1) / (GroupBins::kStep * kRowWarps) *
                   GroupBins::kStep;
  const int begin = min(warp * each, groups), end = min(begin + each, groups);
  const RowBins coarse(weights, 0);
  GroupBins held;
#pragma unroll 1
  for (int at = begin; at < end; at += GroupBins::kGroups) {
    held.read(group_best, at, end, coarse);
#pragma unroll
    for (int k = 0; k < kGroupReads; ++k) {
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        if (held.of(k, j) < kUsedBins) atomicAdd(&shared->law.bins[held.of(k, j)], 1u);
      }
    }
  }
  __syncthreads();

  // Each group has at least one token in its bin or before. So what follows the bins that hold as
  // many groups as the list has room for tokens is not listed, and the first k tokens are in the
  // bins that hold k groups.
  const SummedBins<kBins> groups_in(shared->law.bins);
  const auto wanted = static_cast<std::uint32_t>(max(top_k, 1));
  const int room = min(groups_in.within(kCandidates).bins, kUsedBins);
  const int least = groups_in.within(wanted - 1).bins + 1;
  const bool known = top_k > 0 && least <= min(room, sure_bins(weights));
  const int reach = known ? least : room;
#pragma unroll 1
  for (int at = begin; at < end; at += GroupBins::kGroups) {
    if (end - begin > GroupBins::kGroups) held.read(group_best, at, end, coarse);
#pragma unroll
    for (int k = 0; k < kGroupReads; ++k) {
      std::uint32_t bits = 0;
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) bits |= held.of(k, j) < reach ? 1u << j : 0u;
      const int first = at + k * GroupBins::kStep + lane_id() * kLaneElements;
      if (first < end) {
        reinterpret_cast<std::uint8_t*>(shared->kept)[first / 8] = static_cast<std::uint8_t>(bits);
      }
    }
  }
  __syncwarp();
  const int count = write_groups(begin / 32, end / 32, shared);

  // A thread has groups that follow one another.
  const int mine = (count + kRowThreads - 1) / kRowThreads;
  const int first = static_cast<int>(threadIdx.x) * mine, last = min(first + mine, count);
  clear_masses(shared);  // in place of the bits
  ListMade made{0, 0, -1, 0, false};
  while (max(reach, 1) << (made.finer + 1) <= kFineBins) ++made.finer;
  const int reached = reach << made.finer;
  const RowBins bins(weights, made.finer);
  for_kept(row, shared->groups, first, last, [&](float x, std::int32_t, int) {
    const int bin = bins.of(x, kFineBins);
    if (bin < reached) atomicAdd(&shared->fine[bin], 1u);
  });
  __syncthreads();

  const SummedBins<kFineBins> tokens_in(shared->fine);
  int limit = min(tokens_in.within(kCandidates).bins, reached);
  made.all = limit == kUsedBins << made.finer;
  float edge = static_cast<float>(kFineBins);
  if (known) {
    const auto before = tokens_in.within(wanted - 1);
    if (before.bins < limit) {
      made.cut_bin = before.bins;
      made.rank = wanted - before.held;
      edge = static_cast<float>(before.bins);
      limit = before.bins + 1;
      made.all = false;
    }
  }
  const auto from = static_cast<float>(limit);
  std::uint64_t own = 0;
  for_kept(row, shared->groups, first, last, [&](float x, std::int32_t, int place) {
    if (bins.behind(x) < from) own |= std::uint64_t{1} << place;
  });
  std::uint32_t at = before_in_block(static_cast<std::uint32_t>(__popcll(own)),
                                     shared->listed_of_warp, &made.listed);
#pragma unroll 1
  for (; own != 0; own &= own - 1) {
    const int place = __ffsll(static_cast<long long>(own)) - 1;
    const std::int32_t token =
        shared->groups[first + place / kLaneElements] * kLaneElements + place % kLaneElements;
    const float x = widen(row.scores[token]);
    const std::uint32_t key = order_key(x);
    shared->law.candidates[at++] = {key, 0.0f, token};
    if (bins.behind(x) < edge) continue;
    const std::uint32_t slot = atomicAdd(&shared->num_edge[0], 1u);
    if (slot < kRowThreads) shared->edge[slot] = {key, token, 1};
  }
  __syncthreads();
  return made;
}

}  // namespace specdec::cuda
