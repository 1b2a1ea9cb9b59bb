// What the blocks that share the rows of a step have in common: their shared memory, whose a row
// is, and who comes last.
#pragma once

#include <cstdint>

#include "accept/row_laws.cuh"
#include "accept/row_lists.cuh"
#include "algo/residual.h"
#include "gpu/gpu.cuh"
#include "step/row_best.cuh"

namespace specdec::cuda {

// A rejected draft of a row; both are read at once.
struct alignas(16) RejectedDraft {
  const float* probs;  // [vocab]
  double scale;
};

struct RowShared {
  ListShared list;
  union {
    Best best[kRowWarps];
    Mass mass[kRowWarps];
  };
  std::int32_t parents[kMaxStepTokens];
  RejectedDraft rejected[kMaxStepTokens];  // of a row, in order
  EarlierSibling earlier[kMaxStepTokens];  // the same
  std::int32_t last_rejected, next_child;
  std::uint32_t ticket;
  std::int32_t piece;  // of a rejected draft, in the order of the queue; -1: none
  unsigned verdict;
  bool last, skip;
};

// For all threads of the block: was this the last of so many pieces of a row? What the others have
// written is seen from here on.
__device__ __forceinline__ bool count_piece(unsigned* done, int pieces, RowShared* shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    shared->last = gpu::atomic_add_acq_rel(done, 1u) + 1 == static_cast<unsigned>(pieces);
  }
  __syncthreads();
  return shared->last;
}

__device__ __forceinline__ void add(Mass* to, Mass x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
}

// Whose a row is.
struct RowOwner {
  int request;
  std::int32_t node;
  SamplingLaw law;  // top_k 0 where it cuts nothing
  bool draws;       // is there a law to draw from?
  bool cuts;
};
__device__ __forceinline__ RowOwner owner_of(const RowLawsParams& p, int row) {
  StepView step;
  step.num_requests = p.rows.num_requests;
  step.cu_rows = p.rows.cu_logits;
  RowOwner owner{find_request(step, row), 0, {}, false, false};
  const int b = owner.request;
  if (b >= step.num_requests || step.cu_rows[b] > row || step.cu_rows[b] < 0) return owner;
  owner.law = p.sampling.law(b);
  owner.node = row - step.cu_rows[b];
  owner.draws = RowLaws::draws(owner.law) && (p.parents == nullptr || owner.node < kMaxStepTokens);
  owner.law.top_k = RowLaws::top_k_of(owner.law, p.rows.vocab);
  owner.cuts = owner.draws && RowLaws::cuts(owner.law, p.rows.vocab);
  return owner;
}

// The number that decides the token after a row. For all threads: shared memory is written.
__device__ __forceinline__ double uniform_of(const RowLawsParams& p, const RowOwner& owner, int row,
                                             RowShared* shared) {
  std::int64_t position = p.rows.positions[row];
  if (p.parents != nullptr) {
    const std::int32_t first = p.rows.cu_logits[owner.request];
    if (static_cast<int>(threadIdx.x) <= owner.node) {
      shared->parents[threadIdx.x] = p.parents[first + static_cast<int>(threadIdx.x)];
    }
    __syncthreads();
    position = p.rows.positions[first];
    for (std::int32_t node = owner.node; node > 0; ++position) {
      const std::int32_t parent = shared->parents[node];
      if (parent < 0 || parent >= node) break;  // no tree: nobody will ask
      node = parent;
    }
  }
  return philox_uniform(p.sampling.seed[owner.request], static_cast<std::uint64_t>(position + 1),
                        p.purpose, 0);
}

// Does no path lead to a row? It may come out so later.
__device__ __forceinline__ bool is_unused(const RowLawsParams& p, int row) {
  return p.parents != nullptr && (gpu::load_relaxed(&p.laws.held[row].unused) & kRowUnused) != 0;
}

template <class T>
__device__ __forceinline__ const T* scores_of(const RowLawsParams& p, int row) {
  return static_cast<const T*>(p.rows.scores) + row * p.rows.row_stride;
}

}  // namespace specdec::cuda
