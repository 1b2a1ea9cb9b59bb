// The text of the loops. A file that includes it compiles it once for each kind of vectors, as
// functions with a target of their own; everything else is inlined into these, so that no function
// of wider instructions is shared with other files.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "algo/law_loops.h"
#include "algo/residual.h"
#include "algo/softmax_weight.h"

namespace specdec {
namespace {

// Vectors of one register: the compiler makes single elements of wider ones where it compares them.
template <int kLanes>
struct Vectors {
  static_assert(kMassBlock % kLanes == 0);
  typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
  typedef std::int32_t Ints __attribute__((vector_size(kLanes * sizeof(float))));
  typedef float HalfFloats __attribute__((vector_size(kLanes / 2 * sizeof(float))));
  typedef double Doubles __attribute__((vector_size(kLanes / 2 * sizeof(double))));
};

constexpr float kNoScore = -std::numeric_limits<float>::infinity();

// Always inlined: into functions of whatever target.
#define SPECDEC_LOOP [[gnu::always_inline]] inline

template <class Vector>
SPECDEC_LOOP void load(const float* from, Vector& to) {
  std::memcpy(&to, from, sizeof(to));
}

template <int kLanes>
SPECDEC_LOOP float largest_lane(const typename Vectors<kLanes>::Floats& v) {
  float best = v[0];
  for (std::int32_t j = 1; j < kLanes; ++j) best = v[j] > best ? v[j] : best;
  return best;
}

template <int kLanes>
SPECDEC_LOOP float largest_of(const float* scores, std::int32_t n) {
  using Floats = typename Vectors<kLanes>::Floats;
  using Ints = typename Vectors<kLanes>::Ints;
  Floats best = kNoScore - Floats{};
  Ints nans = {};
  std::int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Floats score;
    load(scores + i, score);
    best = score > best ? score : best;
    nans |= score != score;
  }
  float result = largest_lane<kLanes>(best);
  bool nan = false;
  for (std::int32_t j = 0; j < kLanes; ++j) nan |= nans[j] != 0;
  for (; i < n; ++i) {
    result = scores[i] > result ? scores[i] : result;
    nan |= scores[i] != scores[i];
  }
  return nan ? std::numeric_limits<float>::quiet_NaN() : result;
}

template <int kLanes>
SPECDEC_LOOP std::int32_t weigh_row(const float* scores, std::int32_t n, float best,
                                    float inverse_temperature, float floor, float* weights,
                                    Mass* mass, float* block_best) {
  using Floats = typename Vectors<kLanes>::Floats;
  using Ints = typename Vectors<kLanes>::Ints;
  using HalfFloats = typename Vectors<kLanes>::HalfFloats;
  using Doubles = typename Vectors<kLanes>::Doubles;
  // The compiler makes vectors of this loop, and only of this one.
  for (std::int32_t i = 0; i < n; ++i) {
    weights[i] = to_grid(softmax_weight(law_exponent(scores[i], best, inverse_temperature)));
  }
  Ints kept = {};
  std::int32_t count = 0;
  for (std::int32_t first = 0, b = 0; first < n; first += kMassBlock, ++b) {
    const float *const s = scores + first, *const w = weights + first;
    const std::int32_t size = std::min(n - first, kMassBlock);
    if (size < kMassBlock) {
      block_best[b] = *std::max_element(s, s + size);
      for (std::int32_t i = 0; i < size; ++i) count += w[i] >= floor;
      mass[b] = block_mass(w, size);
      break;
    }
    Floats highest = kNoScore - Floats{};
    Doubles sums[2] = {};  // exact: algo/residual.h
    for (std::int32_t i = 0; i < kMassBlock; i += kLanes) {
      Floats score, weight;
      load(s + i, score);
      load(w + i, weight);
      highest = score > highest ? score : highest;
      kept -= weight >= floor;
      for (std::int32_t half = 0; half < 2; ++half) {
        HalfFloats part;
        load(w + i + half * (kLanes / 2), part);
        sums[half] += __builtin_convertvector(part, Doubles);
      }
    }
    block_best[b] = largest_lane<kLanes>(highest);
    const Doubles sum = sums[0] + sums[1];
    double total = 0.0;
    for (std::int32_t j = 0; j < kLanes / 2; ++j) total += sum[j];
    mass[b] = static_cast<Mass>(total * 0x1p43);
  }
  for (std::int32_t j = 0; j < kLanes; ++j) count += kept[j];
  return count;
}

template <int kLanes>
SPECDEC_LOOP void sum_row_by_size(const float* weights, std::int32_t n, double* sums) {
  using Floats = typename Vectors<kLanes>::Floats;
  Floats lanes[kMassSteps] = {};
  std::int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Floats weight;
    load(weights + i, weight);
    float least = 0.25f;
    for (Floats& sum : lanes) {
      sum += weight >= least ? weight : Floats{};
      least *= 0.25f;
    }
  }
  float least = 0.25f;
  for (std::int32_t step = 0; step < kMassSteps; ++step, least *= 0.25f) {
    sums[step] = 0.0;
    for (std::int32_t j = 0; j < kLanes; ++j) sums[step] += static_cast<double>(lanes[step][j]);
    for (std::int32_t j = i; j < n; ++j) sums[step] += weights[j] >= least ? weights[j] : 0.0f;
  }
}

}  // namespace
}  // namespace specdec

// The loops as k_<kind>, compiled for `target`, an attribute or nothing, with vectors of `lanes`.
#define SPECDEC_LAW_LOOPS(kind, lanes, target)                                                     \
  target float largest_##kind(const float* scores, std::int32_t n) {                               \
    return largest_of<lanes>(scores, n);                                                           \
  }                                                                                                \
  target std::int32_t weigh_##kind(const float* scores, std::int32_t n, float best, float inverse, \
                                   float floor, float* weights, Mass* mass, float* block_best) {   \
    return weigh_row<lanes>(scores, n, best, inverse, floor, weights, mass, block_best);           \
  }                                                                                                \
  target void sum_by_size_##kind(const float* weights, std::int32_t n, double* sums) {             \
    sum_row_by_size<lanes>(weights, n, sums);                                                      \
  }                                                                                                \
  constexpr LawLoops k_##kind = {#kind, largest_##kind, weigh_##kind, sum_by_size_##kind}
