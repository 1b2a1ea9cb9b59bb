// The softmax of attention on matrix fragments, in the arithmetic of
// backend/attention/arithmetic.h.
//
// Scores lie as the matrix instructions leave them: of 8 columns, lane 4g + t of a warp holds
// columns 2t and 2t + 1 of row g (elements 0, 1) and of row g + 8 (elements 2, 3). So a row's sum
// is taken in the same order wherever the row lies.
//
// States are {m, l, O}: greatest score, sum of exponentials, sum of exponentials times values;
// scores in units of log2. The empty state is {-inf, 0, 0}; merging with it changes nothing, nor
// does a block of which a row sees no key.
#pragma once

#include <cstdint>

#include "gpu/gpu.cuh"

namespace specdec::attention {

inline constexpr float kLog2E = 1.44269504088896341f;

__device__ __forceinline__ float empty_max() { return __int_as_float(0xff800000); }  // -infinity

// How q.k becomes a score. Without `mapped` the score is factor * q.k, and the factor can go into
// the exponent's fused multiply-add; otherwise map() first, then the factor is 1.
struct ScoreScale {
  float factor;
  float inner, outer;  // soft cap: outer * tanh(inner * q.k)
  bool mapped, capped;

  __device__ __forceinline__ ScoreScale(float scale, float softcap)
      : factor(scale * kLog2E),
        inner(0.0f),
        outer(scale * kLog2E),
        // The running maximum is taken before the factor, which must therefore be positive.
        mapped(softcap > 0.0f || !(scale > 0.0f)),
        capped(softcap > 0.0f) {
    if (mapped) factor = 1.0f;
    if (capped) inner = scale / softcap, outer = softcap * kLog2E;
  }

  __device__ __forceinline__ float map(float qk) const {
    if (!capped) return outer * qk;
    // tanh x = 1 - 2 / (e^2x + 1), to within rounding of 1.
    const float e = gpu::exp2_approx(qk * inner * (2.0f * kLog2E));
    return outer * (1.0f - __fdividef(2.0f, e + 1.0f));
  }

  __device__ __forceinline__ float score(float qk) const { return mapped ? map(qk) : factor * qk; }
};

// Where exponents are taken from: the maximum, or 0 while no key was seen (-inf - -inf is no
// number).
__device__ __forceinline__ float exponent_base(float m) { return m == empty_max() ? 0.0f : m; }

// What two states are multiplied by when they are merged.
struct MergeWeights {
  float total, part;
};

__device__ __forceinline__ MergeWeights merge_max(float& m_total, float m_part) {
  const float m = fmaxf(m_total, m_part);
  const float base = exponent_base(m);
  const MergeWeights w = {gpu::exp2_approx(m_total - base), gpu::exp2_approx(m_part - base)};
  m_total = m;
  return w;
}

__device__ __forceinline__ float merge(MergeWeights w, float total, float part) {
  return fmaf(part, w.part, total * w.total);
}

// Takes one block of scores into the running maxima and sums of a thread's two rows: s becomes the
// exponentials, `l` holds this thread's share of the sums, and `decay` is what O must be multiplied
// by before the block's values are added.
template <int kTiles>
__device__ __forceinline__ void online_softmax(float (&s)[kTiles][4], float factor, float (&m)[2],
                                               float (&l)[2], float (&decay)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float top = fmaxf(s[0][2 * row], s[0][2 * row + 1]);
#pragma unroll
    for (int n = 1; n < kTiles; ++n) top = fmaxf(top, fmaxf(s[n][2 * row], s[n][2 * row + 1]));
    top = gpu::quad_max(top);
    const float now = fmaxf(m[row], top * factor);
    const float base = exponent_base(now);
    decay[row] = gpu::exp2_approx(m[row] - base);
    m[row] = now;
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float& a = s[n][2 * row];
      float& b = s[n][2 * row + 1];
      a = gpu::exp2_approx(fmaf(a, factor, -base));
      b = gpu::exp2_approx(fmaf(b, factor, -base));
      even += a, odd += b;
    }
    l[row] = fmaf(l[row], decay[row], even + odd);
  }
}

}  // namespace specdec::attention
