// One row of scores under one law, by a block of threads: its mass, its cuts, a draw from it.
//
// Weights are elementwise functions of scores and masses are integers (algo/law_mass.h), so the
// block finds the host's cuts (algo/law_cuts.h). Its list: tokens are counted in bins of (largest -
// score) / temperature; those of the first bins, as many as fit, go into a list in shared memory.
// Only where a cut lies beyond the list (a flat law with a large top_p, or top_k > 2048) the rounds
// of the search read the row itself.
#pragma once

#include <cstdint>

#include "accept/law_shared.cuh"
#include "accept/row_chunks.cuh"
#include "accept/row_weights.cuh"
#include "algo/law_cuts.h"
#include "algo/law_mass.h"
#include "algo/sampling_law.h"
#include "algo/softmax_weight.h"
#include "gpu/gpu.cuh"
#include "kv/elements.cuh"

namespace specdec::cuda {

// All threads of the block call every function, with the same arguments. Functions begin where the
// block has synchronised on what they read, and end so.
template <class T>
class BlockRow {
 public:
  __device__ BlockRow(LawShared* shared, std::int32_t vocab)
      : shared_(shared), masses_(own_masses()), row_(vocab) {}

  // `best`: index of the row's largest score, kBadRow if it holds a NaN. Finds the law's cuts and
  // its mass. 0, kBadRow or kNothingAllowed.
  __device__ TokenId weigh(const T* row, TokenId best, const SamplingLaw& law) {
    if (best < 0) return kBadRow;
    if (const TokenId fault = row_fault(best, widen(row[best])); fault != 0) return fault;
    begin(row, best, law);
    if (law.top_k > 0 || law.top_p < 1.0f) cut_law(*this, law);
    if (!cut_.on_list) weigh_chunks();
    return 0;
  }

  // The same for a row whose cut is known (row_laws.cuh). mass_of_chunk: of a row without cuts.
  __device__ void adopt(const T* row, TokenId best, const SamplingLaw& law, const LawCut& cut,
                        Mass* mass_of_chunk) {
    begin(row, best, law);
    cut_ = cut;
    masses_ = mass_of_chunk;
  }

  // The same for a row whose list is made: shared->candidates, shared->listed of them, of `total`
  // mass before any cut (0: not known, and top_k cuts). False: the cut lies beyond the list, which
  // has `all` tokens of some weight or not.
  __device__ bool cut_list(const T* row, TokenId best, const SamplingLaw& law, Mass total,
                           bool all) {
    begin(row, best, law);
    kept_ = Mass{shared_->listed} + (all ? 0 : 1);
    if (law.top_k > 0) {
      if (!all && static_cast<Mass>(law.top_k) > shared_->listed) return false;
    } else {
      cut_.on_list = true;
      if (kept_mass(*this) < wanted_mass(law.top_p, total)) return false;
      cut_ = {};
      cut_.total = total;
    }
    cut_law(*this, law);
    return true;
  }

  __device__ Mass total() const { return cut_.total; }
  // For adopt(): the list is gone by then.
  __device__ LawCut known_cut() const {
    LawCut cut = cut_;
    cut.on_list = false;
    return cut;
  }

  // The mass of one token of the law, or of what is left of it.
  __device__ float weight(TokenId token) const {
    return residual_ != nullptr ? residual_[token]
                                : weight_of_score(widen(row_.scores[token]), token);
  }

  __device__ TokenId draw(double u) {
    const Mass unit = drawn_unit(u, cut_.total);
    if (cut_.on_list) {
      return find_id(*this, unit + 1, [](const Candidate& c) { return mass_of(c.weight); });
    }
    if (threadIdx.x < 32) {
      const TokenId token =
          find_unit(row_, masses_, unit, [&](std::int32_t id) { return weight(id); });
      if (threadIdx.x == 0) shared_->token = token;
    }
    __syncthreads();
    return shared_->token;
  }

  // probs [vocab]: the probability of each token.
  __device__ void write(float* probs) const {
    const double sum = weight_of(total());
    row_.for_each([&](int, std::int32_t first, int count, const float (&x)[kLaneElements]) {
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        if (j >= count) break;
        const auto w = static_cast<double>(weight_of_score(x[j], first + j));
        probs[first + j] = static_cast<float>(w / sum);
      }
    });
  }

  // e^-entropy.
  __device__ double spread() {
    Mass terms[1] = {};
    for_tokens([&](const Candidate& c) {
      // Equal keys are equal scores, but the key's zero is positive: no difference here.
      terms[0] += entropy_mass(c.weight, exponent(score_of_key(c.key)));
    });
    sum(terms);
    return spread_of(terms[0], cut_.total);
  }

  // The law becomes max(law - probs * scale, 0), kept in `residual` [vocab] from now on.
  // ids null: column = token.
  __device__ void subtract(const float* probs, const TokenId* ids, std::int32_t columns,
                           double scale, float* residual) {
    if (ids != nullptr) {
      if (residual_ == nullptr) {
        row_.for_each([&](int, std::int32_t first, int count, const float (&x)[kLaneElements]) {
#pragma unroll
          for (int j = 0; j < kLaneElements; ++j) {
            if (j < count) residual[first + j] = weight_of_score(x[j], first + j);
          }
        });
        __syncthreads();
      }
      for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < columns; i += threads()) {
        const TokenId id = ids[i];
        if (id < 0 || id >= row_.vocab) continue;
        residual[id] = residual_weight(residual[id], probs[i], scale);
      }
      __syncthreads();
    }
    const bool subtracted = ids != nullptr, again = residual_ != nullptr;
    masses_ = own_masses();
    Mass total[1] = {};
    row_.for_each([&](int chunk, std::int32_t first, int count, const float (&x)[kLaneElements]) {
      Mass mass = 0;
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        if (j >= count) break;
        const std::int32_t id = first + j;
        float w;
        if (subtracted) {
          w = residual[id];
        } else {
          w = again ? residual[id] : weight_of_score(x[j], id);
          residual[id] = w = residual_weight(w, probs[id], scale);
        }
        mass += mass_of(w);
      }
      add_chunk(chunk, mass, total);
    });
    sum(total);
    cut_.total = total[0];
    residual_ = residual;
    cut_.on_list = false;
  }

  // What algo/law_cuts.h asks of a row.
  __device__ __forceinline__ LawCut& cut() { return cut_; }
  __device__ __forceinline__ Mass listed() const { return shared_->listed; }
  // Lists the tokens of the first bins; returns how many tokens min_p and the grid keep in all.
  __device__ Mass list(const SamplingLaw&) {
    if (kept_ > 0) return kept_;
    for (int i = static_cast<int>(threadIdx.x); i < kBins; i += threads()) shared_->bins[i] = 0;
    if (threadIdx.x == 0) shared_->num_candidates = 0;
    __syncthreads();
    Mass kept[1] = {};
    row_.for_each([&](int, std::int32_t, int count, const float (&x)[kLaneElements]) {
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        if (j >= count || weights_.of(x[j]) <= 0.0f) continue;
        ++kept[0];
        atomicAdd(&shared_->bins[bin_of(x[j])], 1u);
      }
    });
    sum(kept);
    if (threadIdx.x < 32) limit_bins(shared_);
    __syncthreads();
    const int limit = shared_->bin_limit;
    row_.for_each([&](int, std::int32_t first, int count, const float (&x)[kLaneElements]) {
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        const float w = weights_.of(x[j]);
        if (j >= count || w <= 0.0f || bin_of(x[j]) >= limit) continue;
        const std::uint32_t at = atomicAdd(&shared_->num_candidates, 1u);
        shared_->candidates[at] = {order_key(x[j]), w, first + j};
      }
    });
    __syncthreads();
    return kept[0];
  }

  // visit(candidate) for each token of some weight, from the list or from the row.
  template <class Visit>
  __device__ __forceinline__ void for_tokens(Visit visit) const {
    if (cut_.on_list) {
      for (std::uint32_t i = threadIdx.x; i < shared_->listed; i += threads()) {
        const Candidate c = shared_->candidates[i];
        if (c.weight > 0.0f && cut_.keeps(c.key, c.id)) visit(c);
      }
      return;
    }
    row_.for_each([&](int, std::int32_t first, int count, const float (&x)[kLaneElements]) {
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        if (j >= count) break;
        const Candidate c{order_key(x[j]), weight_of_score(x[j], first + j), first + j};
        if (c.weight > 0.0f) visit(c);
      }
    });
  }

  // Sums over the block, for all its threads.
  template <int kCount>
  __device__ void sum(Mass (&x)[kCount]) {
    block_sum(shared_, &turn_, x);
  }

 private:
  __device__ Mass* own_masses() const { return reinterpret_cast<Mass*>(shared_ + 1); }
  __device__ void begin(const T* row, TokenId best, const SamplingLaw& law) {
    row_.point_at(row);
    weights_ = {widen(row[best]), law};
    cut_ = {};
    residual_ = nullptr;
    kept_ = 0;
    masses_ = own_masses();
  }

  __device__ __forceinline__ float exponent(float score) const {
    return law_exponent(score, weights_.best, weights_.inverse);
  }
  __device__ __forceinline__ float weight_of_score(float score, TokenId id) const {
    return cut_.keeps(order_key(score), id) ? weights_.of(score) : 0.0f;
  }

  __device__ __forceinline__ void add_chunk(int chunk, Mass mass, Mass (&total)[1]) {
    total[0] += mass;
    const Mass all = gpu::warp_sum(mass);
    if (lane_id() == 0) masses_[chunk] = all;
  }

  // Masses of chunks and total of the law as it is cut now.
  __device__ void weigh_chunks() {
    Mass total[1] = {};
    if (cut_.key_floor == 0) {
      total[0] = weigh_range(row_, weights_, 0, row_.count, masses_);
    } else {
      row_.for_each([&](int chunk, std::int32_t first, int count, const float (&x)[kLaneElements]) {
        Mass mass = 0;
#pragma unroll
        for (int j = 0; j < kLaneElements; ++j) {
          if (j < count) mass += mass_of(weight_of_score(x[j], first + j));
        }
        add_chunk(chunk, mass, total);
      });
    }
    sum(total);
    cut_.total = total[0];
  }

  __device__ __forceinline__ int bin_of(float score) const {
    return min(static_cast<int>(-exponent(score) * kBinsPerUnit), kBins - 1);
  }

  LawShared* shared_;
  Mass* masses_;  // of chunks
  RowChunks<T> row_;
  int turn_ = 0;

  RowWeights weights_;
  LawCut cut_;
  Mass kept_ = 0;              // tokens of a list that others have made, one more if there are more
  float* residual_ = nullptr;  // [vocab] what is left of the law; null: all of it
};

}  // namespace specdec::cuda
