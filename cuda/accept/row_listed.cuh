// A row with top_k or top_p, by one block once its largest score is known: its list, and where that
// is enough its cut and the token drawn.
#pragma once

#include <cstdint>

#include "accept/block_row.cuh"
#include "accept/row_cuts.cuh"
#include "accept/row_laws.cuh"
#include "accept/row_lists.cuh"
#include "accept/row_search.cuh"
#include "accept/row_task.cuh"
#include "gpu/gpu.cuh"

namespace specdec::cuda {

// What lies in a row's part of RowLaws::lists once its list is made; candidates follow.
struct RowList {
  std::uint32_t count;
  std::int32_t finer;
  std::uint32_t all;  // no other token has any weight
  std::uint32_t pad;
};
static_assert(kCandidates == kLawListed && kLaneElements == kLawGroup);
static_assert(sizeof(Candidate) == 12 && sizeof(RowList) == 16 && sizeof(LawCut) == 24);

__device__ __forceinline__ RowList* list_of(const RowLawsParams& p, int row) {
  return reinterpret_cast<RowList*>(p.laws.lists + row * p.laws.list_bytes);
}
__device__ __forceinline__ Candidate* tokens_of(RowList* list) {
  return reinterpret_cast<Candidate*>(list + 1);
}

// Writes down a list that a barrier lies behind.
__device__ __forceinline__ void write_list(const RowLawsParams& p, int row, const ListMade& made,
                                           const ListShared& shared) {
  RowList* list = list_of(p, row);
  Candidate* to = tokens_of(list);
  for (std::uint32_t i = threadIdx.x; i < made.listed; i += kRowThreads) {
    to[i] = shared.law.candidates[i];
  }
  if (threadIdx.x == 0) *list = {made.listed, made.finer, made.all ? 1u : 0u, 0};
}

inline constexpr std::uint32_t kListReads = 4;  // tokens that a thread reads before it keeps one

// Cuts and draws from a row's list, by bisection where too many tokens are in one bin. total: as in
// BlockRow::cut_list.
template <class T>
[[gnu::noinline]] __device__ void draw_row(const RowLawsParams& p, const RowOwner& owner, int row,
                                           const ListMade& made, Mass total, RowShared* shared) {
  const RowWeights weights(score_of(p.laws.best[row]), owner.law);
  const double u = uniform_of(p, owner, row, shared);
  const ListDraw way = draw_listed(made, weights, owner.law, total, u, &shared->list,
                                   p.laws.drawn + row, p.laws.cut + row);
  if (way == ListDraw::kBeyond) return;  // drawn says kCutUnknown
  if (way == ListDraw::kCrowded) {
    LawShared& law = shared->list.law;
    __syncthreads();
    for (std::uint32_t i = threadIdx.x; i < made.listed; i += kRowThreads) {
      law.candidates[i].weight = weights.of(score_of_key(law.candidates[i].key));
    }
    if (threadIdx.x == 0) law.listed = made.listed;
    __syncthreads();
    BlockRow<T> laws(&law, p.rows.vocab);
    if (!laws.cut_list(scores_of<T>(p, row), p.ids[row], owner.law, total, made.all)) return;
    const TokenId token = laws.draw(u);
    if (threadIdx.x == 0) {
      p.laws.cut[row] = laws.known_cut();
      p.laws.drawn[row] = token;
    }
  }
  if (p.holds()) write_list(p, row, made, shared->list);  // with weights, for the row's drafts
}

// The last piece of a row whose law is cut by top_p alone: weighed, or its list made. True: it is
// drawn from.
template <class T>
[[gnu::noinline]] __device__ bool draw_weighed(const RowLawsParams& p, int row, RowShared* shared) {
  clear_masses(&shared->list);
  if (threadIdx.x == 0) shared->list.num_edge[1] = 0;
  const RowOwner owner = owner_of(p, row);
  RowList* list = list_of(p, row);
  const Candidate* from = tokens_of(list);
  const ListMade made{list->count, list->finer, -1, 0, list->all != 0};
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i < made.listed; i += kListReads * kRowThreads) {
    Candidate read[kListReads];
#pragma unroll
    for (std::uint32_t k = 0; k < kListReads; ++k) {
      if (i + k * kRowThreads < made.listed) read[k] = from[i + k * kRowThreads];
    }
#pragma unroll
    for (std::uint32_t k = 0; k < kListReads; ++k) {
      if (i + k * kRowThreads >= made.listed) break;
      shared->list.law.candidates[i + k * kRowThreads] = read[k];
    }
  }
  __syncthreads();
  draw_row<T>(p, owner, row, made, p.laws.total[row], shared);
  return true;
}

// The list of a row that has been searched; cuts and draws where that needs no mass of the row.
// Has the row been drawn from?
template <class T>
[[gnu::noinline]] __device__ bool make_list(const RowLawsParams& p, int row, int pieces,
                                            RowShared* shared) {
  const RowOwner owner = owner_of(p, row);
  const std::uint64_t best = p.laws.best[row];
  const float largest = score_of(best);
  if (const TokenId fault = row_fault(best == kNaNPacked ? kBadRow : 0, largest); fault != 0) {
    if (threadIdx.x == 0) p.laws.drawn[row] = fault;
    return true;
  }
  if (threadIdx.x == 0) shared->skip = is_unused(p, row);
  clear_list(&shared->list);
  __syncthreads();
  if (shared->skip) return false;
  RowChunks<T> chunks(p.rows.vocab);
  chunks.point_at(scores_of<T>(p, row));
  const auto* group_best = reinterpret_cast<const float*>(list_of(p, row));
  const RowWeights weights(largest, owner.law);
  const ListMade made = list_row(chunks, group_best, weights, owner.law.top_k, &shared->list);
  if (owner.law.top_k > 0) {
    draw_row<T>(p, owner, row, made, 0, shared);
    return true;
  }
  write_list(p, row, made, shared->list);
  if (!count_piece(p.laws.done + 2 * row + 1, pieces + 1, shared)) return false;
  return draw_weighed<T>(p, row, shared);
}

}  // namespace specdec::cuda
