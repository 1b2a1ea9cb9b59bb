// RMSNorm and rotary embedding of a step's q and k; q written out, k and v into the pages.
//
// Grid      (rows, blocks of a row). A team of 8, 16 or 32 lanes (K <= 64, 128, 256) owns one head
// of
//           one row at a time, 8 elements a lane; the teams of a row's blocks walk its H + 2G
//           heads. A lane keeps its cos and sin in registers over the heads.
// Exchange  the partner of element i is i +- rotary_dim/2 or i +- 1: the team leaves its head in
//           shared memory, 8 x 32 floats a warp, element e of the team at [e % 8][lane of e], which
//           is free of bank conflicts for writing and reading.
// Bytes     R * (2 H + G) * K * size + R * G * K * (size + 2 stored) + tables, each once. From a
//           product in pieces: units * 4 in place of the first size.
// Limit     few rows: launch, then position and table row, or cu_rows, length and page, in turn.
//           Many rows: the bytes, with the issue of about 200 instructions per 8 elements and lane
//           close behind.
// A head's arithmetic depends on its row's numbers alone: not on the grid or on other rows.
#include "gpu/gpu.cuh"
#include "kv/elements.cuh"
#include "kv/kv.h"
#include "kv/storage.cuh"
#include "linear/sums.cuh"
#include "step/step_rows.cuh"

namespace specdec::cuda {
namespace {

constexpr int kRopeThreads = 128;

struct RopeAlignment {
  bool q, k, v, q_out, pages, q_norm, k_norm;
  bool tables;  // and a lane's pairs lie side by side
};

// One of a row's heads, which are those of q, then of k, then of v.
struct RowHead {
  bool is_q, is_k;
  int own;  // within q, k or v
};
__device__ __forceinline__ RowHead head_of(const RopeAppendKvParams& p, int head) {
  const bool is_q = head < p.num_heads;
  const bool is_k = !is_q && head < p.num_heads + p.cache.num_kv_heads;
  return {is_q, is_k, is_q ? head : head - p.num_heads - (is_k ? 0 : p.cache.num_kv_heads)};
}

// A lane's 8 elements of a head, [at, at + 8), and what rotates them.
struct LaneRotation {
  float cos[kLaneElements], sin[kLaneElements];  // sin negated for the first of a pair
};

// The partner element of `e` in its pair.
__device__ __forceinline__ int partner_of(const RopeAppendKvParams& p, int e) {
  if (p.interleaved) return e ^ 1;
  const int half = p.rotary_dim / 2;
  return e < half ? e + half : e - half;
}

__device__ __forceinline__ LaneRotation load_rotation(const RopeAppendKvParams& p,
                                                      std::int32_t position, int at, bool aligned) {
  LaneRotation r;
  const std::int64_t row = position * p.rope_row_stride;
  if (aligned && at < p.rotary_dim) {
    const int half = p.rotary_dim / 2;
    const std::int64_t pair = row + (at < half ? at : at - half);
    load_floats(p.cos + pair, true, r.cos);
    load_floats(p.sin + pair, true, r.sin);
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) r.sin[i] = at < half ? -r.sin[i] : r.sin[i];
    return r;
  }
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const int e = at + i;
    if (e >= p.rotary_dim) continue;
    const int partner = partner_of(p, e);
    const int pair = p.interleaved ? e / 2 : (e < partner ? e : partner);
    r.cos[i] = p.cos[row + pair];
    r.sin[i] = e < partner ? -p.sin[row + pair] : p.sin[row + pair];
  }
  return r;
}

template <int kTeam>
__device__ __forceinline__ void normalise(const RopeAppendKvParams& p, const void* weight,
                                          bool aligned, int at, float (&x)[kLaneElements]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) sum += x[i] * x[i];
  const float mean = gpu::warp_sum<kTeam>(sum) / static_cast<float>(p.cache.head_dim);
  const float inverse = 1.0f / sqrtf(mean + p.norm_eps);
  if (weight == nullptr || at >= p.cache.head_dim) return;
  float w[kLaneElements];
  load_floats(weight, p.norm_dtype, at, aligned, w);
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    x[i] = (p.norm_plus_one ? w[i] + 1.0f : w[i]) * (x[i] * inverse);
  }
}

template <int kTeam>
__global__ void __launch_bounds__(kRopeThreads)
    rope_append_kernel(const RopeAppendKvParams p, const RopeAlignment aligned) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int row = static_cast<int>(blockIdx.x);
  constexpr int kTeamsPerWarp = 32 / kTeam;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = lane_id();
  const int at = lane % kTeam * kLaneElements;  // first element of the lane
  const bool owns = at < p.cache.head_dim;
  const int heads = p.num_heads + 2 * p.cache.num_kv_heads;
  // A lane's elements of a head, in front of all rotations.
  const auto load_head = [&](int head, float (&x)[kLaneElements]) {
    if (!owns || head >= heads) return;
    if (p.sums.units != nullptr) {
      const int column = head * p.cache.head_dim + at;
      if (p.dtype == DType::kBF16) return load_sums<__nv_bfloat16>(p.sums, row, column, x);
      return load_sums<__half>(p.sums, row, column, x);
    }
    const auto [is_q, is_k, own] = head_of(p, head);
    const void* from = is_q ? p.q : (is_k ? p.k : p.v);
    const std::int64_t stride = is_q ? p.q_row_stride : (is_k ? p.k_row_stride : p.v_row_stride);
    load_floats(from, p.dtype, row * stride + own * std::int64_t{p.cache.head_dim} + at,
                is_q ? aligned.q : (is_k ? aligned.k : aligned.v), x);
  };
  // Loads that wait for no other one come first: few rows take the time of loads in turn.
  const int turn = static_cast<int>(gridDim.y) * (kRopeThreads / 32) * kTeamsPerWarp;
  int first = (static_cast<int>(blockIdx.y) * (kRopeThreads / 32) + warp) * kTeamsPerWarp;
  float x[kLaneElements] = {};
  load_head(first + lane / kTeam, x);
  const std::int32_t position = p.rotary_dim > 0 ? p.step.positions[row] : 0;
  const bool inside = p.rotary_dim == 0 || (position >= 0 && position < p.max_positions);
  LaneRotation rotation;
  if (inside) rotation = load_rotation(p, position, at, aligned.tables);
  const RowPlace place = find_row(p.step, p.cache, row);
  if (place.request == p.step.num_requests) return;
  if (threadIdx.x == 0 && blockIdx.y == 0) {
    report(p.exec.status, place.request, place.flags | (inside ? 0u : kStatusBadLength));
  }

  float* exchange = gpu::dynamic_shared<float>() + warp * kLaneElements * 32;
  // All lanes of a warp make the same turns: they meet at the exchange.
  for (; first < heads; first += turn, load_head(first + lane / kTeam, x)) {
    const int head = first + lane / kTeam;
    const auto [is_q, is_k, own] = head_of(p, head);
    const bool active = owns && head < heads;
    const std::int64_t column = own * std::int64_t{p.cache.head_dim} + at;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) x[i] = inside ? x[i] : 0.0f;
    if (inside && (p.q_norm != nullptr || p.k_norm != nullptr)) {
      const void* weight = is_q ? p.q_norm : (is_k ? p.k_norm : nullptr);
      normalise<kTeam>(p, weight, is_q ? aligned.q_norm : aligned.k_norm, at, x);
    }
    if (p.rotary_dim > 0 && inside) {
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i) exchange[i * 32 + lane] = x[i];
      __syncwarp(kAllLanes);
      if (is_q || is_k) {
#pragma unroll
        for (int i = 0; i < kLaneElements; ++i) {
          if (at + i >= p.rotary_dim) continue;
          const int partner = partner_of(p, at + i);
          const float y = exchange[partner % kLaneElements * 32 + lane / kTeam * kTeam +
                                   partner / kLaneElements];
          x[i] = x[i] * rotation.cos[i] + y * rotation.sin[i];
        }
      }
      __syncwarp(kAllLanes);
    }
    if (!active) continue;
    if (is_q) {
      store_floats(x, p.q_out, p.dtype, row * p.q_out_row_stride + column, aligned.q_out);
    } else if (inside && place.page >= 0) {
      const float scale = storage_scale(p.cache, is_k ? p.k_scale : p.v_scale, p.scale_stride, own);
      store_scaled(
          x, scale, is_k ? p.cache.k : p.cache.v, p.cache.dtype,
          slot_elements(p.cache, p.layer, place.page, place.slot) + own * p.cache.stride_head + at,
          aligned.pages);
    }
  }
}

// Blocks of a row: one where the rows alone fill a large GPU, else one turn for each warp.
unsigned blocks_per_row(int num_rows, int heads, int team) {
  const int heads_per_block = kRopeThreads / team;
  const int most = (heads + heads_per_block - 1) / heads_per_block;
  constexpr int kEnoughBlocks = 1024;
  const int wanted = (kEnoughBlocks + num_rows - 1) / num_rows;
  return static_cast<unsigned>(wanted < most ? wanted : most);
}

}  // namespace

void rope_append_kv(const RopeAppendKvParams& p) {
  if (p.step.num_rows == 0 || p.step.num_requests == 0) return;
  const RopeAlignment aligned = {aligned_for_lanes(p.q, p.dtype, p.q_row_stride),
                                 aligned_for_lanes(p.k, p.dtype, p.k_row_stride),
                                 aligned_for_lanes(p.v, p.dtype, p.v_row_stride),
                                 aligned_for_lanes(p.q_out, p.dtype, p.q_out_row_stride),
                                 aligned_pages(p.cache),
                                 aligned_for_lanes(p.q_norm, p.norm_dtype),
                                 aligned_for_lanes(p.k_norm, p.norm_dtype),
                                 !p.interleaved && p.rotary_dim % (2 * kLaneElements) == 0 &&
                                     aligned_for_lanes(p.cos, DType::kF32, p.rope_row_stride) &&
                                     aligned_for_lanes(p.sin, DType::kF32, p.rope_row_stride)};
  const int team = p.cache.head_dim <= 64 ? 8 : (p.cache.head_dim <= 128 ? 16 : 32);
  auto* kernel = team == 8    ? rope_append_kernel<8>
                 : team == 16 ? rope_append_kernel<16>
                              : rope_append_kernel<32>;
  const int heads = p.num_heads + 2 * p.cache.num_kv_heads;
  const dim3 grid(static_cast<unsigned>(p.step.num_rows),
                  blocks_per_row(p.step.num_rows, heads, team));
  gpu::launch(kernel, grid, dim3(kRopeThreads), kRopeThreads * kLaneElements * sizeof(float),
              p.exec.stream, gpu::LaunchOptions{.dependent = true}, p, aligned);
}

}  // namespace specdec::cuda
