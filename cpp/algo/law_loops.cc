#include "algo/law_loops.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "algo/residual.h"
#include "algo/softmax_weight.h"

namespace specdec {
namespace {

// One vector of the widest kind; the compiler makes several of narrower ones.
constexpr std::int32_t kLanes = 16;
static_assert(kMassBlock % kLanes == 0);
typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
typedef std::int32_t Ints __attribute__((vector_size(kLanes * sizeof(float))));
typedef double Doubles __attribute__((vector_size(kLanes * sizeof(double))));

constexpr float kNoScore = -std::numeric_limits<float>::infinity();

// One text, compiled once for each kind of vectors below.
#define SPECDEC_LOOP [[gnu::always_inline]] inline

SPECDEC_LOOP void load(const float* from, Floats& to) { std::memcpy(&to, from, sizeof(to)); }

SPECDEC_LOOP float largest_lane(const Floats& v) {
  float best = v[0];
  for (std::int32_t j = 1; j < kLanes; ++j) best = v[j] > best ? v[j] : best;
  return best;
}

SPECDEC_LOOP float largest_of(const float* scores, std::int32_t n) {
  Floats best = kNoScore - Floats{};
  Ints nans = {};
  std::int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Floats score;
    load(scores + i, score);
    best = score > best ? score : best;
    nans |= score != score;
  }
  float result = largest_lane(best);
  bool nan = false;
  for (std::int32_t j = 0; j < kLanes; ++j) nan |= nans[j] != 0;
  for (; i < n; ++i) {
    result = scores[i] > result ? scores[i] : result;
    nan |= scores[i] != scores[i];
  }
  return nan ? std::numeric_limits<float>::quiet_NaN() : result;
}

SPECDEC_LOOP std::int32_t weigh_row(const float* scores, std::int32_t n, float best,
                                    float inverse_temperature, float floor, float* weights,
                                    Mass* mass, float* block_best) {
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
    Doubles sum = {};  // exact: algo/residual.h
    for (std::int32_t i = 0; i < kMassBlock; i += kLanes) {
      Floats score, weight;
      load(s + i, score);
      load(w + i, weight);
      highest = score > highest ? score : highest;
      kept -= weight >= floor;
      sum += __builtin_convertvector(weight, Doubles);
    }
    block_best[b] = largest_lane(highest);
    double total = 0.0;
    for (std::int32_t j = 0; j < kLanes; ++j) total += sum[j];
    mass[b] = static_cast<Mass>(total * 0x1p43);
  }
  for (std::int32_t j = 0; j < kLanes; ++j) count += kept[j];
  return count;
}

SPECDEC_LOOP void sum_row_by_size(const float* weights, std::int32_t n, double* sums) {
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

#define SPECDEC_LAW_LOOPS(suffix, target)                                                    \
  target float largest_##suffix(const float* scores, std::int32_t n) {                       \
    return largest_of(scores, n);                                                            \
  }                                                                                          \
  target std::int32_t weigh_##suffix(const float* scores, std::int32_t n, float best,        \
                                     float inverse, float floor, float* weights, Mass* mass, \
                                     float* block_best) {                                    \
    return weigh_row(scores, n, best, inverse, floor, weights, mass, block_best);            \
  }                                                                                          \
  target void sum_by_size_##suffix(const float* weights, std::int32_t n, double* sums) {     \
    sum_row_by_size(weights, n, sums);                                                       \
  }                                                                                          \
  constexpr LawLoops k_##suffix = {#suffix, largest_##suffix, weigh_##suffix, sum_by_size_##suffix}

SPECDEC_LAW_LOOPS(plain, );
#if defined(__x86_64__)
SPECDEC_LAW_LOOPS(avx2, [[gnu::target("avx2")]]);
SPECDEC_LAW_LOOPS(avx512, [[gnu::target("avx512f,avx512dq,avx512bw,avx512vl")]]);
#endif
#undef SPECDEC_LAW_LOOPS
#undef SPECDEC_LOOP

}  // namespace

int num_law_loops() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2")) return 1;
  const bool widest = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return widest ? 3 : 2;
#else
  return 1;
#endif
}

const LawLoops& law_loops_at(int index) {
#if defined(__x86_64__)
  if (index == 2) return k_avx512;
  if (index == 1) return k_avx2;
#endif
  return k_plain;
}

const LawLoops& law_loops() {
  static const LawLoops& widest = law_loops_at(num_law_loops() - 1);
  return widest;
}

}  // namespace specdec
