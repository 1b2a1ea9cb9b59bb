// A row with top_k or top_p, by one block once its largest score is known: its list, and where that
// is enough its cut and the token drawn.
#pragma once

#include <cstdint>

#include "accept/block_row.cuh"
#include "accept/row_laws.cuh"
#include "accept/row_lists.cuh"
#include "gpu/gpu.cuh"
#include "step/row_best.cuh"

namespace specdec::cuda {

inline constexpr int kRowThreads = 256, kRowWarps = kRowThreads / 32;

struct RowShared {
  ListShared list;
  union {
    Best best[kRowWarps];
    Mass mass[kRowWarps];
  };
  std::int32_t parents[kMaxStepTokens];
  std::uint32_t ticket;
  bool last;
};

// What lies in a row's part of RowLaws::lists once its list is made; candidates follow.
struct RowList {
  std::uint32_t count;
  std::uint32_t all;  // no other token has any weight
  std::uint64_t pad;
};
static_assert(kCandidates == kLawListed && kLaneElements == kLawGroup);
static_assert(sizeof(Candidate) == 12 && sizeof(RowList) == 16 && sizeof(LawCut) == 24);

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

template <class T>
__device__ __forceinline__ const T* scores_of(const RowLawsParams& p, int row) {
  return static_cast<const T*>(p.rows.scores) + row * p.rows.row_stride;
}

// Cuts and draws from a row whose list is in the shared memory. total: as in BlockRow::cut_list.
template <class T>
__device__ __forceinline__ void draw_listed(const RowLawsParams& p, const RowOwner& owner, int row,
                                            Mass total, bool all, RowShared* shared) {
  BlockRow<T> laws(&shared->list.law, p.rows.vocab);
  TokenId token = kCutUnknown;
  if (laws.cut_list(scores_of<T>(p, row), p.ids[row], owner.law, total, all)) {
    token = laws.draw(uniform_of(p, owner, row, shared));
    if (threadIdx.x == 0) p.laws.cut[row] = laws.known_cut();
  }
  if (threadIdx.x == 0) p.laws.drawn[row] = token;
}

// The last piece of a row whose law is cut by top_p alone: weighed, or its list made.
template <class T>
[[gnu::noinline]] __device__ void draw_weighed(const RowLawsParams& p, int row, RowShared* shared) {
  const RowOwner owner = owner_of(p, row);
  const auto* list = reinterpret_cast<const RowList*>(p.laws.lists + row * p.laws.list_bytes);
  const auto* from = reinterpret_cast<const Candidate*>(list + 1);
  LawShared& law = shared->list.law;
  for (std::uint32_t i = threadIdx.x; i < list->count; i += kRowThreads)
    law.candidates[i] = from[i];
  if (threadIdx.x == 0) law.listed = list->count;
  const bool all = list->all != 0;
  __syncthreads();
  draw_listed<T>(p, owner, row, p.laws.total[row], all, shared);
}

// The list of a row that has been searched; cuts and draws where that needs no mass of the row.
template <class T>
[[gnu::noinline]] __device__ void make_list(const RowLawsParams& p, int row, int pieces,
                                            RowShared* shared) {
  const RowOwner owner = owner_of(p, row);
  const T* scores = scores_of<T>(p, row);
  const TokenId best = p.ids[row];
  const float largest = best < 0 ? 0.0f : widen(scores[best]);
  if (const TokenId fault = row_fault(best, largest); fault != 0) {
    if (threadIdx.x == 0) p.laws.drawn[row] = fault;
    return;
  }
  RowChunks<T> chunks(p.rows.vocab);
  chunks.point_at(scores);
  char* at = p.laws.lists + row * p.laws.list_bytes;
  const bool all =
      list_row(chunks, reinterpret_cast<const float*>(at), {largest, owner.law}, &shared->list);
  if (owner.law.top_k > 0) return draw_listed<T>(p, owner, row, 0, all, shared);
  auto* list = reinterpret_cast<RowList*>(at);
  auto* to = reinterpret_cast<Candidate*>(list + 1);
  const LawShared& law = shared->list.law;
  for (std::uint32_t i = threadIdx.x; i < law.listed; i += kRowThreads) to[i] = law.candidates[i];
  if (threadIdx.x == 0) *list = {law.listed, all ? 1u : 0u, 0};
  if (count_piece(p.laws.done + 2 * row + 1, pieces + 1, shared)) {
    draw_weighed<T>(p, row, shared);
  }
}

}  // namespace specdec::cuda
