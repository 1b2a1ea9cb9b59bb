// How a row's sums become output: in the finish kernel, or in fast mode in the main pass, if no
// more is to come. Both divide and round alike, so it does not change a bit which of them does.
#pragma once

#include <cstdint>

#include "attention/elements.cuh"
#include "attention/rows.cuh"
#include "attention/softmax.cuh"
#include "attention/spec_attention.h"

namespace specdec::attention {

// Does the main pass write the job's output? Its state is then {0, 1}, or {0, 0} where a row became
// zeros, without sums of values. A job that is cut has several states.
__device__ __forceinline__ bool main_writes(const AttentionLaunch& launch, std::int32_t num_slots) {
  return !launch.call.exact && num_slots == 1;
}

// A row's values, weighted and summed, times this are its output. The head's sink joins m and l: a
// key without a value.
__device__ __forceinline__ float output_factor(const SpecAttentionParams& call, std::int32_t head,
                                               float v_scale, float m, float& l) {
  float decay = 1.0f;
  if (call.sinks != nullptr) {
    const MergeWeights w = merge_max(m, call.sinks[head] * kLog2E);
    l = merge(w, l, 1.0f);
    decay = w.total;
  }
  return l == 0.0f ? 0.0f : decay * v_scale / l;
}

// Two elements of output.
template <class T>
__device__ __forceinline__ std::uint32_t output_pair(float low, float high, float factor) {
  // The added 0 makes one zero of two: a state without keys may have turned -0 to +0.
  return pack<T>(fmaf(low, factor, 0.0f), fmaf(high, factor, 0.0f));
}

template <class T>
__device__ __forceinline__ bool is_finite(std::uint32_t words) {
  const float2 written = unpack<T>(words);
  // inf - inf and NaN - NaN are not 0.
  return written.x - written.x == 0.0f && written.y - written.y == 0.0f;
}

// Writes row `place` of a job's row block, if the request has it. It is as the matrix instructions
// leave it: of every 8 columns, lane t of a quad has pair(n), columns 8 n + 2 t and the next. Whole
// warps call it.
template <class T, int kDim, class Pair>
__device__ __forceinline__ void write_fragment_row(const AttentionLaunch& launch, const Job& job,
                                                   std::int32_t place, float m, float l,
                                                   Pair&& pair) {
  constexpr int kTiles = kDim / 8;
  const SpecAttentionParams& call = launch.call;
  const int lane = static_cast<int>(threadIdx.x & 31);
  const RequestView request = request_view(call.step, job.request);
  const std::int32_t row = job.row_block * launch.row_tile + place, token = row / launch.group;
  const bool exists = token < request.rows;
  const std::int32_t head = job.kv_head * launch.group + row - token * launch.group;
  const float factor = output_factor(call, head, value_scale(call, job.kv_head), m, l);
  // Twice, as there may be no registers for a row of them.
  const auto word = [&](int n) {
    const float2 two = pair(n);
    return output_pair<T>(two.x, two.y, factor);
  };
  bool bad = l == 0.0f;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) bad = bad || !is_finite<T>(word(n));
  bad = (__ballot_sync(kAllLanes, bad) >> (lane & ~3) & 15u) != 0;
  if (exists && lane % 4 == 0) {
    const std::int64_t state = std::int64_t{job.first_slot} * launch.row_tile + place;
    reinterpret_cast<float2*>(launch.work.state_ml)[state] = make_float2(0.0f, bad ? 0.0f : 1.0f);
  }
  T* out = static_cast<T*>(call.out) + (request.first_row + token) * call.out_row_stride +
           head * static_cast<std::int64_t>(kDim);
#pragma unroll
  for (int n = 0; n < kTiles; n += 4) {
    std::uint32_t four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      four[i] = bad || n + i >= kTiles ? 0u : word(n + i < kTiles ? n + i : 0);
    gpu::quad_transpose(four);
    if (exists && n + lane % 4 < kTiles) {
      *reinterpret_cast<uint4*>(out + 8 * (n + lane % 4)) =
          make_uint4(four[0], four[1], four[2], four[3]);
    }
  }
}

}  // namespace specdec::attention
