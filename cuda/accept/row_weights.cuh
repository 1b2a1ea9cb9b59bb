// Weights and masses of a row's tokens under a law without cuts, and the unit of its mass that a
// number falls on.
#pragma once

#include <cstdint>

#include "accept/law_shared.cuh"
#include "accept/row_chunks.cuh"
#include "algo/law_cuts.h"
#include "algo/law_mass.h"
#include "algo/residual.h"
#include "algo/sampling_law.h"
#include "algo/softmax_weight.h"
#include "gpu/gpu.cuh"
#include "gpu/rounding.cuh"

namespace specdec::cuda {

inline constexpr float kLargestFloat = 3.402823466e38f;

// What a law makes of a score before top_k and top_p.
struct RowWeights {
  float best = 0.0f, inverse = 1.0f, min_p = 0.0f;

  __device__ RowWeights() {}
  __device__ RowWeights(float largest, const SamplingLaw& law)
      : best(largest), inverse(1.0f / law.temperature), min_p(law.min_p) {}

  __device__ __forceinline__ float of(float score) const {
    const float w = to_grid(softmax_weight(law_exponent(score, best, inverse)));
    return w >= min_p ? w : 0.0f;
  }
  // May add_mass() do it? Not where a product with the temperature's inverse is no number.
  __device__ __forceinline__ bool plain() const {
    return min_p == 0.0f && inverse <= kLargestFloat;
  }
};

// What a row without a law answers in place of a token; 0: it has one.
__device__ __forceinline__ TokenId row_fault(TokenId best, float largest) {
  if (best < 0 || largest > kLargestFloat) return kBadRow;
  return largest < -kLargestFloat ? kNothingAllowed : 0;
}

// Masses in two parts, whose sums over a chunk fit 32 bits: units of 2^-22 and of 2^-43.
struct MassParts {
  std::uint32_t high = 0, low = 0;
};
inline constexpr int kMassPartShift = 21;
static_assert(kChunk <= 512, "a sum of either part stays below 2^32");

// mass_of(to_grid(softmax_weight(law_exponent(score, best, inverse)))) without conversions, which
// are slow: numbers move into the low bits of a float by sums that round as told. Both parts are
// offset by a constant, see mass_of_parts(). Bit for bit the same because
//   n = trunc(x) for x in (-2^7, 0] is what a sum with -2^23 keeps if it rounds to zero;
//   n * 0.693359375 is exact, so fusing it with its sum changes nothing;
//   below -87 the weight is 0 on the grid, whichever of the two ways it is computed;
//   high = floor(w 2^22), and what is left of w is exact, to the nearest multiple, ties to even.
__device__ __forceinline__ void add_mass(float score, float best, float inverse, MassParts& sum) {
  const float z = fmaxf((score - best) * inverse, -87.0f);
  const float shifted = gpu::add_towards_zero(z * 1.44269504f - 0.5f, -0x1p23f);
  const float n = shifted + 0x1p23f;
  const float r = __fmaf_rn(n, -0.693359375f, z) + n * 2.12194440e-4f;
  float p = 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const float power = __uint_as_float((127u << 23) - (__float_as_uint(shifted) << 23));
  const float high = gpu::fma_towards_zero(p, power, 2.0f);
  const float low = __fmaf_rn(p, power, (2.0f + 0x1p-20f) - high);
  sum.high += __float_as_uint(high);
  sum.low += __float_as_uint(low);
}
// The same for a probability, which may be none: then the sum means nothing.
__device__ __forceinline__ void add_prob(float q, MassParts& sum, bool& faulty) {
  faulty |= !is_probability(q);
  const float high = gpu::add_towards_zero(q, 2.0f);
  const float low = q + ((2.0f + 0x1p-20f) - high);
  sum.high += __float_as_uint(high);
  sum.low += __float_as_uint(low);
}
// The mass of kCount tokens that add_mass() or add_prob() was called for.
template <std::uint32_t kCount>
__device__ __forceinline__ Mass mass_of_parts(const MassParts& sum) {
  return (static_cast<Mass>(sum.high - kCount * 0x40000000u) << kMassPartShift) +
         (sum.low - kCount * 0x35800000u);
}

// The mass of a whole chunk of which every lane holds its part; writes it down, and returns it to
// lane 0 and nothing to others.
__device__ __forceinline__ Mass weigh_chunk(const float (&x)[kLaneElements], float best,
                                            float inverse, bool counts, Mass* to) {
  MassParts sum;
#pragma unroll
  for (int j = 0; j < kLaneElements; ++j) add_mass(x[j], best, inverse, sum);
  sum = {__reduce_add_sync(kAllLanes, sum.high), __reduce_add_sync(kAllLanes, sum.low)};
  if (!counts || lane_id() != 0) return 0;
  return *to = mass_of_parts<static_cast<std::uint32_t>(kChunk)>(sum);
}

// Masses of the chunks [begin, end) of a row, divided over the warps of the block; the calling
// thread's share of their sum.
template <class T>
__device__ __forceinline__ Mass weigh_range(const RowChunks<T>& row, const RowWeights& weights,
                                            int begin, int end, Mass* mass_of_chunk) {
  const int warp = static_cast<int>(threadIdx.x / 32), warps = threads() / 32;
  const int whole = row.aligned && weights.plain() ? min(end, row.vocab / kChunk) : begin;
  const float best = weights.best, inverse = weights.inverse;
  Mass total = 0;
  int chunk = begin + warp;
  // Two chunks in turn, each read while the other is weighed; behind the end the last one again.
  float x[kLaneElements], y[kLaneElements];
  if (chunk < whole) load_floats(row.scores + row.first_of(chunk), true, x);
#pragma unroll 1
  for (; chunk < whole; chunk += 2 * warps) {
    const int second = chunk + warps;
    load_floats(row.scores + row.first_of(min(second, whole - 1)), true, y);
    total += weigh_chunk(x, best, inverse, true, mass_of_chunk + chunk);
    load_floats(row.scores + row.first_of(min(second + warps, whole - 1)), true, x);
    total += weigh_chunk(y, best, inverse, second < whole, mass_of_chunk + second);
  }
  // The first that was not whole: a warp may have come to the end in the middle of a turn.
  if (whole > begin + warp)
    chunk = begin + warp + (whole - begin - warp + warps - 1) / warps * warps;
#pragma unroll 1
  for (; chunk < end; chunk += warps) {
    const std::int32_t first = row.first_of(chunk);
    const int count = row.tokens_from(first);
    Mass mass = 0;
#pragma unroll 1
    for (int j = 0; j < count; ++j) mass += mass_of(weights.of(widen(row.scores[first + j])));
    const Mass all = gpu::warp_sum(mass);
    if (lane_id() == 0) {
      mass_of_chunk[chunk] = all;
      total += all;
    }
  }
  return total;
}

// The token in which the unit lies, of a row whose chunks have these masses: a warp's work, valid
// for all its lanes. weight(token): on the grid.
template <class T, class Weight>
__device__ __forceinline__ TokenId find_unit(const RowChunks<T>& row, const Mass* mass_of_chunk,
                                             Mass unit, Weight weight) {
  const int lane = lane_id(), mine = (row.count + 31) / 32;
  const int begin = min(lane * mine, row.count), end = min(begin + mine, row.count);
  Mass sum = 0;
#pragma unroll 4
  for (int i = begin; i < end; ++i) sum += mass_of_chunk[i];
  int chunk = 0;
  Mass before = exclusive_sum(sum);
  const int owner = lane_of(before, sum, unit);
  if (lane == owner) {
    for (chunk = begin; unit - before >= mass_of_chunk[chunk]; ++chunk) {
      before += mass_of_chunk[chunk];
    }
  }
  chunk = __shfl_sync(kAllLanes, chunk, owner);
  const Mass rest = unit - __shfl_sync(kAllLanes, before, owner);
  const std::int32_t first = row.first_of(chunk);
  const int count = row.tokens_from(first);
  sum = 0;
  for (int j = 0; j < count; ++j) sum += mass_of(weight(first + j));
  before = exclusive_sum(sum);
  const int last = lane_of(before, sum, rest);
  TokenId token = first;
  if (lane == last) {
    for (Mass own; rest - before >= (own = mass_of(weight(token))); ++token) before += own;
  }
  return __shfl_sync(kAllLanes, token, last);
}

}  // namespace specdec::cuda
