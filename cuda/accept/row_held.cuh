// Drafts drawn from probabilities, held against the rows of their parents while other rows are
// weighed. What does not depend on the path is found for every draft that a path may still reach:
// the sum of its probabilities, whether its parent keeps it, and if not the mass of what it leaves.
//
// A draft is held by whoever comes last of the two that it takes: the sum of its probabilities, and
// its parent's law, which for the first child is the row's own and for others what the sibling
// before has left. A rejected draft goes into a queue; whoever is free subtracts a piece of it. So
// no block waits for a decision. The rules are those of accept_by_rejection (algo/accept_rules.h).
#pragma once

#include <cstdint>

#include "accept/row_laws.cuh"
#include "accept/row_listed.cuh"
#include "accept/row_search.cuh"
#include "accept/row_task.cuh"
#include "accept/row_weights.cuh"
#include "algo/accept_rules.h"
#include "algo/residual.h"
#include "gpu/gpu.cuh"
#include "gpu/rounding.cuh"

namespace specdec::cuda {

// What a request's rule wants of its rows besides their laws.
enum class RowRule {
  kNone,
  kDrawn,  // a child is kept if it is the token that was drawn
  kSums,   // of the probabilities of drafts
  kHeld    // that, and the drafts held
};

struct RowTree {
  std::int32_t first = 0, size = 0;
  RowRule rule = RowRule::kNone;
};

// None where the request is no tree that fits.
__device__ __forceinline__ RowTree tree_of(const RowLawsParams& p, const RowOwner& owner) {
  RowTree tree;
  if (p.parents == nullptr || !owner.draws || p.accept.synthetic.given()) return tree;
  const std::int32_t b = owner.request;
  if (!has_rows(p.rows, b)) return tree;
  tree.first = p.rows.cu_logits[b];
  tree.size = p.rows.cu_logits[b + 1] - tree.first;
  if (tree.size > kMaxStepTokens) return tree;
  const bool drawn = p.accept.drawn_from_probs(b), whole = p.holds();
  switch (static_cast<AcceptanceRule>(p.accept.rule[b])) {
    case AcceptanceRule::kExactMatch:
      tree.rule = RowRule::kDrawn;
      break;
    case AcceptanceRule::kRejection:
      tree.rule = !drawn ? RowRule::kDrawn : whole ? RowRule::kHeld : RowRule::kNone;
      break;
    case AcceptanceRule::kBestBeam:
      tree.rule = !drawn ? RowRule::kDrawn : whole ? RowRule::kSums : RowRule::kNone;
      break;
    case AcceptanceRule::kThreshold:
      tree.rule = drawn && whole ? RowRule::kSums : RowRule::kNone;
      break;
    default:
      break;
  }
  return tree;
}

__device__ __forceinline__ void load_parents(const RowLawsParams& p, const RowTree& tree,
                                             RowShared* shared) {
  const int i = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (i < tree.size) shared->parents[i] = p.parents[tree.first + i];
  __syncthreads();
}

// The first child of a node behind another; -1: there is none. For all threads.
__device__ __forceinline__ std::int32_t child_behind(const RowTree& tree, std::int32_t node,
                                                     std::int32_t behind, RowShared* shared) {
  const int i = static_cast<int>(threadIdx.x);
  if (i == 0) shared->next_child = INT32_MAX;
  __syncthreads();
  if (i > behind && i < tree.size && shared->parents[i] == node) atomicMin(&shared->next_child, i);
  __syncthreads();
  return shared->next_child == INT32_MAX ? -1 : shared->next_child;
}

// The children of a node before `end`, all of them rejected, into the shared memory: their number.
__device__ __forceinline__ int gather_rejected(const RowLawsParams& p, const RowOwner& owner,
                                               const RowTree& tree, std::int32_t node,
                                               std::int32_t end, RowShared* shared) {
  const int i = static_cast<int>(threadIdx.x);
  const bool mine = i > node && i < end && shared->parents[i] == node;
  if (mine) {
    int before = 0;
    for (std::int32_t k = node + 1; k < i; ++k) before += shared->parents[k] == node ? 1 : 0;
    const std::int32_t row = tree.first + i;
    const DraftLaw q = p.accept.law_of(owner.request, i);
    shared->rejected[before] = {q.probs, p.laws.held[row].scale};
    shared->earlier[before] = {p.accept.tokens[row], q.column};
  }
  const int count = __syncthreads_count(mine ? 1 : 0);
  if (i == 0) shared->last_rejected = -1;
  __syncthreads();
  if (mine) atomicMax(&shared->last_rejected, i);
  __syncthreads();
  return count;
}

// Marks what no path leads to below a node: unused(child) says it of its children, and what hangs
// below such a child is neither used nor held.
template <class Unused>
__device__ __forceinline__ void mark_unused(const RowLawsParams& p, const RowTree& tree,
                                            std::int32_t node, RowShared* shared, Unused unused) {
  const int i = static_cast<int>(threadIdx.x);
  if (i <= node || i >= tree.size) return;
  std::int32_t child = i, above = shared->parents[i];
  while (above > node && above < child) {
    child = above;
    above = shared->parents[child];
  }
  if (above != node) return;
  const unsigned bits = unused(child);
  if (bits == 0) return;
  atomicOr(&p.laws.held[tree.first + i].unused, i == child ? bits : kRowUnused | kNeverHeld);
}

// Has the other of the two that it takes to hold a draft come before? For all threads.
__device__ __forceinline__ bool join(HeldDraft* held, RowShared* shared) {
  return count_piece(&held->joined, 2, shared);
}

// A row's law without the drafts that were rejected.
template <class T>
struct LawLeft {
  RowChunks<T> chunks;
  RowWeights weights;
  LawCut cut;
  const RejectedDraft* rejected;
  int count;
  // What a row that cuts keeps is on its list, if its draw found it; null for other rows.
  const Candidate* list = nullptr;
  std::int32_t listed = 0;

  __device__ LawLeft(const RowLawsParams& p, const RowOwner& owner, int row, int drafts,
                     const RowShared* shared)
      : chunks(p.rows.vocab), rejected(shared->rejected), count(drafts) {
    chunks.point_at(scores_of<T>(p, row));
    weights = {score_of(p.laws.best[row]), owner.law};
    cut = p.laws.cut_of(row, owner.law, p.rows.vocab);
    if (!owner.cuts) return;
    listed = static_cast<std::int32_t>(list_of(p, row)->count);
    list = tokens_of(list_of(p, row));
  }
  __device__ __forceinline__ float of_score(float score, TokenId token) const {
    return cut.keeps(order_key(score), token) ? weights.of(score) : 0.0f;
  }
  __device__ float of(TokenId token) const {
    float w = of_score(widen(chunks.scores[token]), token);
    for (int i = 0; i < count; ++i) {
      w = residual_weight(w, rejected[i].probs[token], rejected[i].scale);
    }
    return w;
  }
  // Masses of the chunks [begin, end): the calling thread's share of their sum.
  __device__ Mass weigh(int begin, int end, Mass* mass_of_chunk) const {
    Mass total = 0;
    chunks.template for_range<1>(
        begin, end,
        [&](int chunk, std::int32_t first, int tokens, const float (&x)[kLaneElements]) {
          float w[kLaneElements];
#pragma unroll
          for (int j = 0; j < kLaneElements; ++j) w[j] = of_score(x[j], first + j);
#pragma unroll 1
          for (int i = 0; i < count; ++i) {
            RowChunks<float> probs(chunks.vocab);
            probs.point_at(rejected[i].probs);
            float q[kLaneElements];
            probs.load(first, tokens, q);
#pragma unroll
            for (int j = 0; j < kLaneElements; ++j) {
              w[j] = residual_weight(w[j], q[j], rejected[i].scale);
            }
          }
          Mass mass = 0;
#pragma unroll
          for (int j = 0; j < kLaneElements; ++j) mass += j < tokens ? mass_of(w[j]) : 0;
          mass = gpu::warp_sum(mass);
          if (lane_id() == 0) total += mass_of_chunk[chunk] = mass;
        });
    return total;
  }
};

// A row's law along its list: of what is left, chunks are those of listed tokens.
template <class T>
struct ListLeft {
  const LawLeft<T>& law;
  RowChunks<T> chunks;

  __device__ explicit ListLeft(const LawLeft<T>& left) : law(left), chunks(left.listed) {}
  __device__ __forceinline__ float kept(const Candidate& c) const {
    return law.cut.keeps(c.key, c.id) ? c.weight : 0.0f;
  }
  __device__ float of(std::int32_t at) const {
    const Candidate c = law.list[at];
    float w = kept(c);
    for (int i = 0; i < law.count; ++i) {
      w = residual_weight(w, law.rejected[i].probs[c.id], law.rejected[i].scale);
    }
    return w;
  }
  // As LawLeft::weigh, of all chunks.
  __device__ Mass weigh(Mass* mass_of_chunk) const {
    Mass total = 0;
#pragma unroll 1
    for (int chunk = static_cast<int>(threadIdx.x / 32); chunk < chunks.count; chunk += kRowWarps) {
      const std::int32_t first = chunks.first_of(chunk);
      const int tokens = chunks.tokens_from(first);
      TokenId id[kLaneElements];
      float w[kLaneElements];
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        const Candidate c = j < tokens ? law.list[first + j] : Candidate{0, 0.0f, 0};
        id[j] = c.id;
        w[j] = kept(c);
      }
#pragma unroll 1
      for (int i = 0; i < law.count; ++i) {
        float q[kLaneElements];
#pragma unroll
        for (int j = 0; j < kLaneElements; ++j) q[j] = law.rejected[i].probs[id[j]];
#pragma unroll
        for (int j = 0; j < kLaneElements; ++j) {
          w[j] = residual_weight(w[j], q[j], law.rejected[i].scale);
        }
      }
      Mass mass = 0;
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) mass += mass_of(w[j]);
      mass = gpu::warp_sum(mass);
      if (lane_id() == 0) total += mass_of_chunk[chunk] = mass;
    }
    return total;
  }
};

inline constexpr unsigned kDraftOpen = 0, kDraftKept = 1, kDraftRejected = 2;

// Does a row keep a draft when `earlier` others have been rejected? One thread's work.
template <class T>
__device__ unsigned judge_draft(const RowLawsParams& p, const RowOwner& owner, const RowTree& tree,
                                std::int32_t parent, int earlier, const RowShared* shared) {
  const int at = tree.first + owner.node, row = tree.first + parent;
  HeldDraft& held = p.laws.held[at];
  DraftLaw q = p.accept.law_of(owner.request, owner.node);
  q.mass = weight_of(held.mass);
  if (held.faults != 0 || q.column < 0 || !sums_to_one(q.mass) || !(q.probs[q.column] > 0.0f)) {
    return kDraftOpen;
  }
  const bool remove = !p.accept.with_replacement(owner.request);
  const double mass = draft_mass(q, shared->earlier, remove ? earlier : 0);
  const LawLeft<T> law(p, owner, row, earlier, shared);
  const double total = weight_of(
      earlier == 0 ? law.cut.total : p.laws.held[tree.first + shared->last_rejected].left);
  std::int32_t depth = 0;
  for (std::int32_t node = parent; node > 0; ++depth) {
    const std::int32_t above = shared->parents[node];
    if (above < 0 || above >= node) return kDraftOpen;
    node = above;
  }
  const DraftedTree drafted{nullptr, shared->parents, tree.size, p.sampling.seed[owner.request],
                            std::int64_t{p.rows.positions[tree.first]} + 1};
  const double u = accept_uniform_at(drafted, depth, earlier);
  const auto weight = static_cast<double>(law.of(p.accept.tokens[at]));
  held.scale = total / mass;
  return u * wanted_weight(q, mass, total) < weight ? kDraftKept : kDraftRejected;
}

__device__ __forceinline__ void keep_draft(const RowLawsParams& p, const RowTree& tree, int at,
                                           std::int32_t parent, RowShared* shared) {
  const std::int32_t node = at - tree.first;
  if (threadIdx.x == 0) p.laws.outcome[tree.first + parent] = {node, p.accept.tokens[at]};
  mark_unused(p, tree, parent, shared,
              [&](std::int32_t child) { return child > node ? kRowUnused | kNeverHeld : 0u; });
}

// Holds a draft against what is left of its parent's law.
template <class T>
[[gnu::noinline]] __device__ void hold_draft(const RowLawsParams& p, int at, RowShared* shared) {
  const RowOwner owner = owner_of(p, at);
  const RowTree tree = tree_of(p, owner);
  load_parents(p, tree, shared);
  const std::int32_t parent = shared->parents[owner.node];
  const int earlier = gather_rejected(p, owner, tree, parent, owner.node, shared);
  if (threadIdx.x == 0) shared->verdict = judge_draft<T>(p, owner, tree, parent, earlier, shared);
  __syncthreads();
  if (shared->verdict == kDraftKept) return keep_draft(p, tree, at, parent, shared);
  if (shared->verdict == kDraftOpen) return;
  mark_unused(p, tree, parent, shared,
              [&](std::int32_t child) { return child == owner.node ? kRowUnused : 0u; });
  if (threadIdx.x == 0) {
    const unsigned turn = atomicAdd(&p.laws.queue->rejected, 1u);
    gpu::store_release(p.laws.rejected + turn, static_cast<unsigned>(at));
  }
}

// What the law of a row that has just been drawn from means for its children. tickets: tasks of
// all.
template <class T>
[[gnu::noinline]] __device__ void finish_row(const RowLawsParams& p, int row, int tickets,
                                             RowShared* shared) {
  if (!p.holds()) {  // marks alone, which are for rows that nobody has begun with
    __syncthreads();
    if (threadIdx.x == 0) {
      shared->skip = gpu::load_relaxed(&p.laws.queue->tickets) >= static_cast<unsigned>(tickets);
    }
    __syncthreads();
    if (shared->skip) return;
  }
  const RowOwner owner = owner_of(p, row);
  const RowTree tree = tree_of(p, owner);
  if (tree.rule != RowRule::kDrawn && tree.rule != RowRule::kHeld) return;
  load_parents(p, tree, shared);
  const TokenId token = p.laws.drawn[row];
  if (token == kCutUnknown) return;
  if (tree.rule == RowRule::kDrawn) {
    return mark_unused(p, tree, owner.node, shared, [&](std::int32_t child) {
      return p.accept.tokens[tree.first + child] == token ? 0u : kRowUnused;
    });
  }
  const std::int32_t child = child_behind(tree, owner.node, owner.node, shared);
  if (child < 0 || token < 0) {
    if (threadIdx.x == 0) p.laws.outcome[row] = {kNoDraft, token};
    return;
  }
  const int at = tree.first + child;
  if (join(p.laws.held + at, shared)) hold_draft<T>(p, at, shared);
}

inline constexpr int kSummed = 4;  // chunks that a warp reads before it looks at the first

// The mass of the probabilities of the chunks [begin, end): the calling thread's share.
__device__ __forceinline__ Mass sum_probs(const RowChunks<float>& probs, int begin, int end,
                                          bool& faulty) {
  static_assert(kSummed * kLaneElements * 2 < 1 << 10, "a sum of upper parts stays below 2^32");
  const int whole = probs.aligned ? min(end, probs.vocab / kChunk) : begin;
  int chunk = begin + static_cast<int>(threadIdx.x / 32);
  Mass total = 0;
#pragma unroll 1
  for (; chunk + (kSummed - 1) * kRowWarps < whole; chunk += kSummed * kRowWarps) {
    const float* from = probs.scores + probs.first_of(chunk);
    float q[kSummed][kLaneElements];
#pragma unroll
    for (int k = 0; k < kSummed; ++k) load_floats(from + k * kRowWarps * kChunk, true, q[k]);
    MassParts sum;
#pragma unroll
    for (int k = 0; k < kSummed; ++k) {
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) add_prob(q[k][j], sum, faulty);
    }
    total += mass_of_parts<kSummed * kLaneElements>(sum);
  }
  // What is left of a warp's share, is not whole, or begins anywhere.
#pragma unroll 1
  for (; chunk < end; chunk += kRowWarps) {
    const std::int32_t first = probs.first_of(chunk);
    const int columns = probs.tokens_from(first);
#pragma unroll 1
    for (int j = 0; j < columns; ++j) {
      const float q = probs.scores[first + j];
      faulty |= !is_probability(q);
      if (is_probability(q)) total += mass_of(to_grid(q));
    }
  }
  return total;
}

// A piece of the probabilities that the draft at a row was drawn from.
template <class T>
[[gnu::noinline]] __device__ void sum_draft(const RowLawsParams& p, int at, int begin, int end,
                                            int pieces, RowShared* shared) {
  const RowOwner owner = owner_of(p, at);
  const RowTree tree = tree_of(p, owner);
  if ((tree.rule != RowRule::kSums && tree.rule != RowRule::kHeld) || owner.node == 0) return;
  HeldDraft& held = p.laws.held[at];
  const float* from = p.accept.law_of(owner.request, owner.node).probs;
  if (from == nullptr) return;
  if (threadIdx.x == 0) shared->skip = (gpu::load_relaxed(&held.unused) & kNeverHeld) != 0;
  __syncthreads();
  if (shared->skip) return;
  RowChunks<float> probs(p.rows.vocab);
  probs.point_at(from);
  bool faulty = false;
  const Mass mine = gpu::warp_sum(sum_probs(probs, begin, end, faulty));
  if (lane_id() == 0) shared->mass[threadIdx.x / 32] = mine;
  faulty = __syncthreads_or(faulty ? 1 : 0) != 0;
  if (threadIdx.x == 0) {
    Mass sum = 0;
    for (int w = 0; w < kRowWarps; ++w) sum += shared->mass[w];
    add(&held.mass, sum);
    if (faulty) atomicOr(&held.faults, 1u);
  }
  if (!count_piece(&held.summed, pieces, shared)) return;
  if (threadIdx.x == 0) held.known = 1;
  if (tree.rule == RowRule::kHeld && join(&held, shared)) hold_draft<T>(p, at, shared);
}

// A piece of its parent's law without the draft at a row, and the siblings before it; of a law that
// cuts, the first has the whole list. Whoever comes last holds the next sibling, or draws from what
// is left by all.
template <class T>
[[gnu::noinline]] __device__ void subtract_draft_piece(const RowLawsParams& p, int at, int begin,
                                                       int end, int pieces, RowShared* shared) {
  const RowOwner owner = owner_of(p, at);
  if (owner.cuts && begin > 0) return;
  const RowTree tree = tree_of(p, owner);
  load_parents(p, tree, shared);
  const std::int32_t parent = shared->parents[owner.node];
  const int row = tree.first + parent;
  const int count = gather_rejected(p, owner, tree, parent, owner.node + 1, shared);
  HeldDraft& held = p.laws.held[at];
  const LawLeft<T> law(p, owner, row, count, shared);
  Mass* masses = p.laws.masses_of(row);
  const ListLeft<T> on_list(law);
  const Mass share = owner.cuts ? on_list.weigh(masses) : law.weigh(begin, end, masses);
  const Mass mine = gpu::warp_sum(share);
  if (lane_id() == 0) shared->mass[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    Mass sum = 0;
    for (int w = 0; w < kRowWarps; ++w) sum += shared->mass[w];
    add(&held.left, sum);
  }
  if (!count_piece(&held.subtracted, owner.cuts ? 1 : pieces, shared)) return;
  const Mass left = held.left;
  // Nothing left: the law was the draft's up to rounding, so the draft is as good as a draw from
  // it.
  if (left == 0) return keep_draft(p, tree, at, parent, shared);
  const std::int32_t next = child_behind(tree, parent, owner.node, shared);
  if (next >= 0) {
    if (join(p.laws.held + tree.first + next, shared)) hold_draft<T>(p, tree.first + next, shared);
    return;
  }
  const double u = uniform_of(p, owner_of(p, row), row, shared);
  if (threadIdx.x >= 32) return;
  const Mass unit = drawn_unit(u, left);
  TokenId token;
  if (owner.cuts) {
    token = law.list[find_unit(on_list.chunks, masses, unit,
                               [&](std::int32_t i) { return on_list.of(i); })]
                .id;
  } else {
    token = find_unit(law.chunks, masses, unit, [&](std::int32_t id) { return law.of(id); });
  }
  if (lane_id() == 0) p.laws.outcome[row] = {kNoDraft, token};
}

}  // namespace specdec::cuda
