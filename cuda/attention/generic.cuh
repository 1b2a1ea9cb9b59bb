// Attention for every shape: one block for each (row, KV head, up to 8 of its query heads).
//
// Keys      a row's visible positions, [lo, p] and sink tokens in front of them, in chunks of 128
//           and groups of 32 at fixed absolute positions; those without a key are left out. A warp
//           takes a chunk at a time and starts it from an empty state; the block folds the chunks
//           of a round into the row's state in ascending order.
// Lanes     a key each for scores and softmax, then a few head dims each for P * V, key by key. A
//           position below kv_len is a committed token, from there on a node of the row's path: the
//           mask's set bits in ascending order, for a tree's nodes are in topological order.
// Shared    q [8, K] as float32, the path's slots [128]; per warp probabilities [8, 32] and the
//           state of its chunk [8, 2 + K]. 83 KB at K = 256, the most.
// Bytes     every block reads all K and V that its row sees: nothing is shared between rows besides
//           what the L2 cache keeps. Limit: the latency of a warp's loads, a few microseconds for
//           a round of 1024 keys. This is the kernel for what has no fast instance.
//
// Exact by construction: what a position adds, and after what, depends on the position alone, never
// on whether its token is committed or a draft, nor on slots, pages, other rows or the grid. Sums
// are float32; probabilities are not rounded.
#pragma once

#include "attention/generic.h"
#include "backend/attention/arithmetic.h"
#include "gpu/gpu.cuh"
#include "kv/elements.cuh"
#include "kv/storage.cuh"
#include "step/step_rows.cuh"

namespace specdec::cuda {

inline constexpr int kGenericWarps = 8;
inline constexpr int kGenericThreads = kGenericWarps * 32;
inline constexpr int kGenericHeads = 8;  // query heads of one KV head that a block serves
inline constexpr int kGroupKeys = 32;
inline constexpr int kChunkKeys = 128;
// kDims head dims of a lane: 4 for K <= 128, 8 for K <= 256. The block's [heads, K] result has as
// many elements for each of its threads.
static_assert(kGenericHeads * 32 == kGenericThreads);

struct GenericCall {
  SpecAttentionParams p;
  std::int32_t group;        // query heads of one KV head, H / G
  std::int32_t head_blocks;  // of kGenericHeads, per KV head
  bool aligned_q, aligned_kv;
};

// The block's shared memory.
struct GenericShared {
  float* q;            // [kGenericHeads, K]
  float* p;            // [kGenericWarps, kGenericHeads, kGroupKeys]
  float* max;          // [kGenericWarps, kGenericHeads] of a round's chunks
  float* sum;          // the same
  float* out;          // [kGenericWarps, kGenericHeads, K]
  std::int32_t* path;  // [kMaxStepTokens]

  __device__ __forceinline__ GenericShared(float* base, int head_dim)
      : q(base),
        p(q + kGenericHeads * head_dim),
        max(p + kGenericWarps * kGenericHeads * kGroupKeys),
        sum(max + kGenericWarps * kGenericHeads),
        out(sum + kGenericWarps * kGenericHeads),
        path(reinterpret_cast<std::int32_t*>(out + kGenericWarps * kGenericHeads * head_dim)) {}
  static std::size_t bytes(int head_dim) {
    return sizeof(float) * static_cast<std::size_t>(
                               kGenericHeads * head_dim * (1 + kGenericWarps) +
                               kGenericWarps * kGenericHeads * (kGroupKeys + 2) + kMaxStepTokens);
  }
};

// What a block works at.
struct GenericRow {
  int request, row;                // row of the whole step
  int kv_head, first_head, heads;  // query heads [first_head, first_head + heads)
  std::int32_t kv_len;
  std::int32_t begin, end;  // visible positions
  std::int32_t sink_end;    // and those before it; 0: no others
  bool tree;
};

// The number of nodes of a row's path, or -1 if the mask names the row's descendants or rows that
// are not the request's. The block's first warp leaves the nodes in `path`.
__device__ __forceinline__ int list_path(const std::uint32_t* mask, int row_in_request,
                                         std::int32_t* path) {
  const int lane = lane_id();
  int count = 0;
  bool beyond = false;
  for (int w = 0; w < kMaskWords; ++w) {
    const std::uint32_t bits = mask[w];
    if ((bits >> lane & 1u) != 0) {
      if (threadIdx.x < 32) path[count + __popc(bits & ((1u << lane) - 1u))] = w * 32 + lane;
      beyond |= w * 32 + lane > row_in_request;
    }
    count += __popc(bits);
  }
  return __any_sync(kAllLanes, beyond ? 1 : 0) != 0 ? -1 : count;
}

// Finds the row's request and keys. Flags say why it has none; B and 0 flags: nobody's row.
__device__ __forceinline__ std::uint32_t find_keys(const SpecAttentionParams& p,
                                                   const GenericShared& shared, GenericRow& row) {
  row.request = find_request(p.step, row.row);
  row.begin = row.end = row.sink_end = 0;
  if (row.request == p.step.num_requests) return 0;
  const RequestRows rows = request_rows(p.step, row.request, p.cache.page_size);
  if (!rows.valid || row.row < rows.first) return kStatusBadLength;
  const int index = row.row - rows.first;
  row.kv_len = rows.kv_len;
  row.tree = p.step.is_tree[row.request] != 0;
  int own = index + 1;
  if (row.tree) {
    if (rows.count > kMaxStepTokens) return kStatusBadTree;
    own = list_path(p.step.mask + std::int64_t{row.row} * kMaskWords, index, shared.path);
    if (own < 0) return kStatusBadTree;
  }
  row.end = row.kv_len + own;
  row.begin = attention::first_visible(row.end - 1, p.sliding_window, p.sink_tokens, p.first_key);
  if (row.begin > p.sink_tokens) row.sink_end = p.sink_tokens;
  return 0;
}

// A warp's state of one chunk, spread over the lanes.
template <int kDims>
struct GenericState {
  float max[kGenericHeads], sum[kGenericHeads];  // the same in all lanes
  float out[kGenericHeads][kDims];               // head dims [lane * kDims, + kDims)

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < kGenericHeads; ++h) {
      max[h] = __int_as_float(0xff800000);
      sum[h] = 0.0f;
#pragma unroll
      for (int i = 0; i < kDims; ++i) out[h][i] = 0.0f;
    }
  }
};

// scores[h] = q_h . k for the lane's key, in chains of 32 head dims.
template <class T>
__device__ __forceinline__ void dot_heads(const float* q, const T* k, bool aligned, int head_dim,
                                          int heads, float (&scores)[kGenericHeads]) {
#pragma unroll
  for (int h = 0; h < kGenericHeads; ++h) scores[h] = 0.0f;
  for (int begin = 0; begin < head_dim; begin += 32) {
    const int end = min(begin + 32, head_dim);
    float chain[kGenericHeads] = {};
    for (int d = begin; d < end; d += kLaneElements) {
      float key[kLaneElements];
      load_floats(k + d, aligned, key);
#pragma unroll
      for (int h = 0; h < kGenericHeads; ++h) {
        if (h >= heads) break;
#pragma unroll
        for (int i = 0; i < kLaneElements; ++i) {
          chain[h] = fmaf(q[h * head_dim + d + i], key[i], chain[h]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kGenericHeads; ++h) scores[h] += chain[h];
  }
}

// Adds the group of keys at positions [base, base + 32) to the state. False: a page is bad.
template <class T, int kDims>
__device__ __forceinline__ bool add_group(const GenericCall& call, const GenericRow& row,
                                          const GenericShared& shared, std::int32_t base,
                                          float scale, GenericState<kDims>& state) {
  const SpecAttentionParams& p = call.p;
  const int lane = lane_id(), head_dim = p.cache.head_dim;
  float* weights = shared.p + threadIdx.x / 32 * (kGenericHeads * kGroupKeys);
  const std::int32_t position = base + lane;
  const bool visible = (position >= row.begin && position < row.end) || position < row.sink_end;
  std::int32_t page = 0;
  std::int64_t at = 0;
  if (visible) {
    const std::int32_t slot = row.tree && position >= row.kv_len
                                  ? row.kv_len + shared.path[position - row.kv_len]
                                  : position;
    page = page_of(p.step, row.request, slot, page_shift(p.cache.page_size), p.cache.num_pages);
    at = slot_elements(p.cache, p.layer, page, slot) + row.kv_head * p.cache.stride_head;
  }
  if (__any_sync(kAllLanes, page < 0 ? 1 : 0) != 0) return false;

  float scores[kGenericHeads] = {};
  if (visible) {
    dot_heads(shared.q, static_cast<const T*>(p.cache.k) + at, call.aligned_kv, head_dim, row.heads,
              scores);
  }
#pragma unroll
  for (int h = 0; h < kGenericHeads; ++h) {
    if (h >= row.heads) break;
    float score = scores[h] * scale;
    if (p.softcap > 0.0f) score = p.softcap * tanhf(score / p.softcap);
    if (!visible) score = __int_as_float(0xff800000);
    const float max = fmaxf(state.max[h], gpu::warp_max(score));
    const float weight = visible ? expf(score - max) : 0.0f;
    const float rescale = expf(state.max[h] - max);  // 0 for the first group
    state.max[h] = max;
    state.sum[h] = state.sum[h] * rescale + gpu::warp_sum(weight);
#pragma unroll
    for (int i = 0; i < kDims; ++i) state.out[h][i] *= rescale;
    weights[h * kGroupKeys + lane] = weight;
  }
  __syncwarp(kAllLanes);

  const bool owns = lane * kDims < head_dim;
  // Sink tokens, then the window's keys.
#pragma unroll 1
  for (int part = base < row.sink_end ? 0 : 1; part < 2; ++part) {
    const int first = part == 0 ? 0 : max(row.begin - base, 0);
    const int last = min((part == 0 ? row.sink_end : row.end) - base, kGroupKeys);
    for (int key = first; key < last; ++key) {
      const std::int64_t key_at = __shfl_sync(kAllLanes, at, key);
      if (!owns) continue;
      float value[kDims];
      load_floats(static_cast<const T*>(p.cache.v) + key_at + lane * kDims, call.aligned_kv, value);
#pragma unroll
      for (int h = 0; h < kGenericHeads; ++h) {
        if (h >= row.heads) break;
        const float weight = weights[h * kGroupKeys + key];
#pragma unroll
        for (int i = 0; i < kDims; ++i) {
          state.out[h][i] = fmaf(weight, value[i], state.out[h][i]);
        }
      }
    }
  }
  __syncwarp(kAllLanes);
  return true;
}

// Leaves the state of the warp's chunk for the fold.
template <int kDims>
__device__ __forceinline__ void leave_state(const GenericShared& shared,
                                            const GenericState<kDims>& state, int heads,
                                            int head_dim) {
  const int warp = static_cast<int>(threadIdx.x / 32), dim = lane_id() * kDims;
#pragma unroll
  for (int h = 0; h < kGenericHeads; ++h) {
    if (h >= heads) break;
    const int at = warp * kGenericHeads + h;
    if (lane_id() == 0) {
      shared.max[at] = state.max[h];
      shared.sum[at] = state.sum[h];
    }
    if (dim >= head_dim) continue;
#pragma unroll
    for (int i = 0; i < kDims; ++i) shared.out[at * head_dim + dim + i] = state.out[h][i];
  }
}

// The row's result so far: elements thread + i * kGenericThreads of its [heads, K].
template <int kDims>
struct GenericFold {
  float max[kDims], sum[kDims], out[kDims];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      max[i] = __int_as_float(0xff800000);
      sum[i] = out[i] = 0.0f;
    }
  }
  // Element i joins its part of the chunk that `warp` left; head h, element e of [heads, K].
  __device__ __forceinline__ void add(int i, const GenericShared& shared, int warp, int h, int e,
                                      int head_dim) {
    const int at = warp * kGenericHeads + h;
    const float chunk_max = shared.max[at], both = fmaxf(max[i], chunk_max);
    const float rescale = expf(max[i] - both), weight = expf(chunk_max - both);
    max[i] = both;
    sum[i] = sum[i] * rescale + shared.sum[at] * weight;
    out[i] = out[i] * rescale + shared.out[warp * kGenericHeads * head_dim + e] * weight;
  }
  // The sink joins, the sum divides.
  __device__ __forceinline__ float result(int i, const float* sink, float v_scale) const {
    if (sink == nullptr) return out[i] / sum[i] * v_scale;
    const float both = fmaxf(max[i], *sink), rescale = expf(max[i] - both);
    return out[i] * rescale / (sum[i] * rescale + expf(*sink - both)) * v_scale;
  }
};

// Walks the row's keys and folds them. Flags: a page is bad.
template <class T, int kDims>
__device__ __forceinline__ std::uint32_t fold_keys(const GenericCall& call, const GenericRow& row,
                                                   const GenericShared& shared,
                                                   GenericFold<kDims>& fold) {
  const SpecAttentionParams& p = call.p;
  const int warp = static_cast<int>(threadIdx.x / 32), head_dim = p.cache.head_dim;
  const float scale =
      p.k_scale != nullptr ? p.scale * p.k_scale[row.kv_head * p.scale_stride] : p.scale;
  // The sink tokens' chunks are followed by the window's.
  const int sink_chunks = (row.sink_end + kChunkKeys - 1) / kChunkKeys;
  const int between = max(row.begin / kChunkKeys - sink_chunks, 0);
  const int num_chunks = (row.end + kChunkKeys - 1) / kChunkKeys - between;
  for (int first = 0; first < num_chunks; first += kGenericWarps) {
    const int place = first + warp;
    const std::int32_t chunk = (place < sink_chunks ? place : place + between) * kChunkKeys;
    const std::int32_t begin = chunk < row.sink_end ? chunk : max(row.begin, chunk);
    const std::int32_t end = min(row.end, chunk + kChunkKeys);
    GenericState<kDims> state;
    state.clear();
    bool good = true;
    for (std::int32_t base = begin / kGroupKeys * kGroupKeys; base < end && good;
         base += kGroupKeys) {
      if (base >= row.sink_end && base + kGroupKeys <= row.begin) continue;
      good = add_group<T>(call, row, shared, base, scale, state);
    }
    leave_state(shared, state, row.heads, head_dim);
    if (__syncthreads_or(good ? 0 : 1) != 0) return kStatusBadPage;
    const int chunks = min(kGenericWarps, num_chunks - first);
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      const int e = static_cast<int>(threadIdx.x) + i * kGenericThreads;
      if (e >= row.heads * head_dim) break;
      for (int w = 0; w < chunks; ++w) fold.add(i, shared, w, e / head_dim, e, head_dim);
    }
    __syncthreads();
  }
  return 0;
}

template <class T, int kDims>
__global__ void __launch_bounds__(kGenericThreads) generic_kernel(const GenericCall call) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const SpecAttentionParams& p = call.p;
  const int thread = static_cast<int>(threadIdx.x), head_dim = p.cache.head_dim;
  const int per_row = p.cache.num_kv_heads * call.head_blocks;
  const int unit = static_cast<int>(blockIdx.x);
  const GenericShared shared(gpu::dynamic_shared<float>(), head_dim);
  GenericRow row = {};
  row.row = unit / per_row;
  row.kv_head = unit % per_row / call.head_blocks;
  const int first_in_group = unit % call.head_blocks * kGenericHeads;
  row.first_head = row.kv_head * call.group + first_in_group;
  row.heads = min(kGenericHeads, call.group - first_in_group);
  const int elements = row.heads * head_dim;

  std::uint32_t flags = find_keys(p, shared, row);
  const std::int64_t q_at = row.row * p.q_row_stride + std::int64_t{row.first_head} * head_dim;
  for (int e = thread * kLaneElements; e < elements; e += kGenericThreads * kLaneElements) {
    float x[kLaneElements];
    load_floats(p.q, p.dtype, q_at + e, call.aligned_q, x);
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) shared.q[e + i] = x[i];
  }
  __syncthreads();
  GenericFold<kDims> fold;
  fold.clear();
  if (flags == 0) flags = fold_keys<T>(call, row, shared, fold);

  const float v_scale = p.v_scale != nullptr ? p.v_scale[row.kv_head * p.scale_stride] : 1.0f;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    const int e = thread + i * kGenericThreads;
    if (e >= elements) break;
    const float* sink = p.sinks != nullptr ? p.sinks + row.first_head + e / head_dim : nullptr;
    // Without any key: 0 / 0.
    fold.out[i] = row.begin < row.end && flags == 0 ? fold.result(i, sink, v_scale) : 0.0f;
    finite &= fabsf(fold.out[i]) <= 3.402823466e38f;
  }
  if (__syncthreads_and(finite ? 1 : 0) == 0) flags |= kStatusNaN;
  if (thread == 0) report(p.exec.status, row.request, flags);
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    const int e = thread + i * kGenericThreads;
    if (e >= elements) break;
    store_float(flags == 0 ? fold.out[i] : 0.0f, p.out, p.dtype,
                row.row * p.out_row_stride + std::int64_t{row.first_head} * head_dim + e);
  }
}

}  // namespace specdec::cuda
