// A row with top_k or top_p, by one block once its largest score is known: its list, and where that
// is enough its cut and the token drawn.
#pragma once

#include <cstdint>

#include "accept/block_row.cuh"
#include "accept/row_laws.cuh"
#include "accept/row_lists.cuh"
#include "accept/row_task.cuh"
#include "gpu/gpu.cuh"

namespace specdec::cuda {

// What lies in a row's part of RowLaws::lists once its list is made; candidates follow.
struct RowList {
  std::uint32_t count;
  std::uint32_t all;  // no other token has any weight
  std::uint64_t pad;
};
static_assert(kCandidates == kLawListed && kLaneElements == kLawGroup);
static_assert(sizeof(Candidate) == 12 && sizeof(RowList) == 16 && sizeof(LawCut) == 24);

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

// The last piece of a row whose law is cut by top_p alone: weighed, or its list made. True: it is
// drawn from.
template <class T>
[[gnu::noinline]] __device__ bool draw_weighed(const RowLawsParams& p, int row, RowShared* shared) {
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
  return true;
}

// The list of a row that has been searched; cuts and draws where that needs no mass of the row.
// Has the row been drawn from?
template <class T>
[[gnu::noinline]] __device__ bool make_list(const RowLawsParams& p, int row, int pieces,
                                            RowShared* shared) {
  const RowOwner owner = owner_of(p, row);
  const T* scores = scores_of<T>(p, row);
  const TokenId best = p.ids[row];
  const float largest = best < 0 ? 0.0f : widen(scores[best]);
  if (const TokenId fault = row_fault(best, largest); fault != 0) {
    if (threadIdx.x == 0) p.laws.drawn[row] = fault;
    return true;
  }
  if (threadIdx.x == 0) shared->skip = is_unused(p, row);
  __syncthreads();
  if (shared->skip) return false;
  RowChunks<T> chunks(p.rows.vocab);
  chunks.point_at(scores);
  char* at = p.laws.lists + row * p.laws.list_bytes;
  const bool all =
      list_row(chunks, reinterpret_cast<const float*>(at), {largest, owner.law}, &shared->list);
  if (owner.law.top_k > 0) {
    draw_listed<T>(p, owner, row, 0, all, shared);
    return true;
  }
  auto* list = reinterpret_cast<RowList*>(at);
  auto* to = reinterpret_cast<Candidate*>(list + 1);
  const LawShared& law = shared->list.law;
  for (std::uint32_t i = threadIdx.x; i < law.listed; i += kRowThreads) to[i] = law.candidates[i];
  if (threadIdx.x == 0) *list = {law.listed, all ? 1u : 0u, 0};
  if (!count_piece(p.laws.done + 2 * row + 1, pieces + 1, shared)) return false;
  return draw_weighed<T>(p, row, shared);
}

}  // namespace specdec::cuda
