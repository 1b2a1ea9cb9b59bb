// The finish kernel: folds the states of the main pass, adds the tail keys, divides, writes. Rows
// that the main pass has written (output.cuh) it leaves as they are, unless they are to be zeros.
//
// grid    one warp per (step row, KV head, kHeads of its query heads), rows fastest: the warps of a
//         block read the same committed tail keys. kHeads is the least with which all warps run at
//         once: a warp's time is that of dependent loads, the more the more heads it has
// begins  while the main pass ends, which had waited for all but its own states and flags
// lane    kVec consecutive elements of the head dim; a lane beyond it computes with zeros
// order   where tail keys lie -> their scores -> states in chunk order -> the tail as the last one:
//         maximum, exponentials, sums in position order -> sink -> out
// cost    per 8 tail keys and head 8 kVec FMA and 9 shuffles, per state and head 2 kVec operations
//
// Everything is float32 in an order that is fixed by the row's position: a score is one chain of
// kVec fused multiply-adds per lane and one tree over the lanes, the same tree for every key.
#pragma once

#include <cstdint>

#include "attention/elements.cuh"
#include "attention/output.cuh"
#include "attention/softmax.cuh"
#include "attention/tail.cuh"
#include "step/step_rows.cuh"

namespace specdec::attention {

inline constexpr int kFinishWarps = 4;
template <int kHeads>
struct FinishShared {
  std::int64_t offsets[kMaxTail];              // of tail keys in the pool, in elements
  alignas(16) float scores[kMaxTail][kHeads];  // then their exponentials
};

// The states of a row's heads: how many, and the row in the first one. `most` of any head. Those
// whose output the main pass has written have none to fold.
template <int kHeads>
struct StatesOfHeads {
  std::int32_t most = 0;
  std::int32_t count[kHeads] = {}, place[kHeads] = {};
  bool written[kHeads] = {};
};

// kHeads query heads of one step row: states of a lane's elements.
template <class T, class Kv, int kHeads, int kVec>
struct RowFinisher {
  // States that are on their way at once: as many as registers are left for.
  static constexpr int kStates = kHeads * kVec > 32           ? 1
                                 : kHeads * kVec > 8          ? 2
                                 : (kHeads == 1 && kVec <= 4) ? 8
                                                              : 4;

  const AttentionLaunch& launch;
  FinishShared<kHeads>* shared;
  std::int32_t lane, kv_head, heads;  // of the kHeads that exist
  bool active;                        // has this lane elements?
  float m[kHeads], l[kHeads], o[kHeads][kVec];

  __device__ __forceinline__ RowFinisher(const AttentionLaunch& launch,
                                         FinishShared<kHeads>* shared, std::int32_t kv_head)
      : launch(launch),
        shared(shared),
        lane(static_cast<std::int32_t>(threadIdx.x & 31)),
        kv_head(kv_head),
        heads(0),
        active(lane * kVec < launch.call.cache.head_dim) {}

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      m[h] = empty_max(), l[h] = 0.0f;
#pragma unroll
      for (int e = 0; e < kVec; ++e) o[h][e] = 0.0f;
    }
  }

  // This lane's elements of a tail key.
  __device__ __forceinline__ const Kv* place(const void* pool, std::int32_t key) const {
    return static_cast<const Kv*>(pool) + shared->offsets[key] + lane * kVec;
  }

  __device__ __forceinline__ void load(const void* pool, std::int32_t key,
                                       float (&to)[kVec]) const {
    if (active) {
      load_floats(place(pool, key), to);
    } else {
#pragma unroll
      for (int e = 0; e < kVec; ++e) to[e] = 0.0f;
    }
  }

  // Keys and values of the tail that are on their way at once. A warp of one head is one of few:
  // its time is that of its loads.
  static constexpr int kBatch = 8;  // whose scores are one transposed sum
  static constexpr int kKeyBatches = kHeads == 1 && kVec <= 4 ? 2 : 1;
  static constexpr int kValues = kHeads == 1 && kVec <= 4 ? 16 : 4;

  // scores[key][head] in units of log2.
  __device__ __forceinline__ void score_tail(const T* q, std::int32_t num_keys) {
    const ScoreScale scale(score_scale(launch.call, kv_head), launch.call.softcap);
    float query[kHeads][kVec];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) query[h][e] = 0.0f;
      if (active && h < heads) {
        load_floats(q + h * launch.call.cache.head_dim + lane * kVec, query[h]);
      }
    }
    for (std::int32_t first = 0; first < num_keys; first += kKeyBatches * kBatch) {
      float key[kKeyBatches * kBatch][kVec];
#pragma unroll
      for (int i = 0; i < kKeyBatches * kBatch; ++i) {
        const std::int32_t at = min(first + i, num_keys - 1);
        load(launch.k, at, key[i]);
        // Values are wanted behind the wait.
        if (kHeads == 1 && active) gpu::prefetch_l2(place(launch.v, at));
      }
#pragma unroll
      for (int b = 0; b < kKeyBatches; ++b) {
        const std::int32_t mine = first + b * kBatch + lane / 4;
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          float dot[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const float (&k)[kVec] = key[b * kBatch + i];
            dot[i] = query[h][0] * k[0];
#pragma unroll
            for (int e = 1; e < kVec; ++e) dot[i] = fmaf(query[h][e], k[e], dot[i]);
          }
          const float score = scale.score(transposed_sum(dot));
          if (lane % 4 == h % 4 && mine < num_keys) shared->scores[mine][h] = score;
        }
      }
    }
    __syncwarp();
  }

  // Merges the tail into {m, l, o}: one state, its keys in position order.
  __device__ __forceinline__ void sum_tail(std::int32_t num_keys) {
    // Scores are [key][head]: a lane meets one head only.
    float* scores = &shared->scores[0][0];
    float top = empty_max();
    for (std::int32_t i = lane; i < num_keys * kHeads; i += 32) top = fmaxf(top, scores[i]);
#pragma unroll
    for (int other = kHeads; other < 32; other *= 2) {
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, other));
    }
    const float base = exponent_base(top);
    for (std::int32_t i = lane; i < num_keys * kHeads; i += 32) {
      scores[i] = gpu::exp2_approx(scores[i] - base);
    }
    __syncwarp();
    float l_tail[kHeads], o_tail[kHeads][kVec];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      l_tail[h] = 0.0f;
#pragma unroll
      for (int e = 0; e < kVec; ++e) o_tail[h][e] = 0.0f;
    }
    for (std::int32_t first = 0; first < num_keys; first += kValues) {
      float value[kValues][kVec];
#pragma unroll
      for (int i = 0; i < kValues; ++i) load(launch.v, min(first + i, num_keys - 1), value[i]);
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (first + i >= num_keys) break;
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float p = shared->scores[first + i][h];
          l_tail[h] += p;
#pragma unroll
          for (int e = 0; e < kVec; ++e) o_tail[h][e] = fmaf(p, value[i][e], o_tail[h][e]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const MergeWeights w = merge_max(m[h], __shfl_sync(kAllLanes, top, h));
      l[h] = merge(w, l[h], l_tail[h]);
#pragma unroll
      for (int e = 0; e < kVec; ++e) o[h][e] = merge(w, o[h][e], o_tail[h][e]);
    }
  }

  // State `s` of a row that is at `place` in the job's first one.
  __device__ __forceinline__ void load_state(std::int32_t place, std::int32_t s, float2* ml,
                                             float (&part)[kVec]) const {
    const std::int64_t row = std::int64_t{s} * launch.row_tile + place;
    *ml = reinterpret_cast<const float2*>(launch.work.state_ml)[row];
    if (!active) return;
    const float* from = launch.work.state_o + row * launch.call.cache.head_dim + lane * kVec;
    if constexpr (kVec == 2) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      part[0] = two.x, part[1] = two.y;
    } else {
#pragma unroll
      for (int e = 0; e < kVec; e += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + e);
        part[e] = four.x, part[e + 1] = four.y, part[e + 2] = four.z, part[e + 3] = four.w;
      }
    }
  }

  // Where the plan has put the states of a token's heads, the first of which is row `first_row`.
  __device__ __forceinline__ StatesOfHeads<kHeads> find_states(const RequestView& request,
                                                               std::int32_t first_row) const {
    const WorkView& work = launch.work;
    const std::int32_t row_blocks =
        (request.rows * launch.group + launch.row_tile - 1) / launch.row_tile;
    // The heads of a token may lie in two row blocks: lane h looks up head h.
    const std::int32_t my_row = first_row + min(lane, heads - 1);
    const Job& job =
        work.jobs[work.job_begin[request.index] + kv_head * row_blocks + my_row / launch.row_tile];
    const bool my_written = main_writes(launch, job.num_slots);
    const std::int32_t my_slots = my_written ? 0 : job.num_slots;
    const std::int32_t my_place = job.first_slot * launch.row_tile + my_row % launch.row_tile;
    StatesOfHeads<kHeads> states;
    states.most = __reduce_max_sync(kAllLanes, my_slots);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      states.count[h] = h < heads ? __shfl_sync(kAllLanes, my_slots, h) : 0;
      states.place[h] = __shfl_sync(kAllLanes, my_place, h);
      states.written[h] = h < heads && __shfl_sync(kAllLanes, my_written ? 1 : 0, h) != 0;
    }
    return states;
  }

  // Merges them, in chunk order, into {m, l, o}; of heads that are written, takes what stands in
  // l's place.
  __device__ __forceinline__ void fold_states(const StatesOfHeads<kHeads>& states) {
    for (std::int32_t first = 0; first < states.most; first += kStates) {
      float2 ml[kStates][kHeads];
      float part[kStates][kHeads][kVec];
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          ml[s][h] = make_float2(empty_max(), 0.0f);
#pragma unroll
          for (int e = 0; e < kVec; ++e) part[s][h][e] = 0.0f;
          if (first + s < states.count[h]) {
            load_state(states.place[h], first + s, &ml[s][h], part[s][h]);
          }
        }
      }
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const MergeWeights w = merge_max(m[h], ml[s][h].x);
          l[h] = merge(w, l[h], ml[s][h].y);
#pragma unroll
          for (int e = 0; e < kVec; ++e) o[h][e] = merge(w, o[h][e], part[s][h][e]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (states.written[h]) l[h] = launch.work.state_ml[std::int64_t{2} * states.place[h] + 1];
    }
  }

  // Divides and writes; a head whose result is no finite number is written as zeros. Returns
  // whether there was one.
  __device__ __forceinline__ bool write(T* out, std::int32_t first_head,
                                        const StatesOfHeads<kHeads>& states) {
    const SpecAttentionParams& call = launch.call;
    const float v_scale = value_scale(call, kv_head);
    bool any_bad = false;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) continue;
      if (states.written[h]) {
        any_bad = any_bad || l[h] == 0.0f;
        continue;
      }
      const float factor = output_factor(call, first_head + h, v_scale, m[h], l[h]);
      std::uint32_t words[kVec / 2];
      bool bad = false;
#pragma unroll
      for (int e = 0; e < kVec; e += 2) {
        words[e / 2] = output_pair<T>(o[h][e], o[h][e + 1], factor);
        bad = bad || !is_finite<T>(words[e / 2]);
      }
      bad = __any_sync(kAllLanes, bad) != 0 || l[h] == 0.0f;
      any_bad = any_bad || bad;
      store(out + h * call.cache.head_dim, words, bad);
    }
    return any_bad;
  }

  __device__ __forceinline__ void store(T* out, const std::uint32_t (&words)[kVec / 2],
                                        bool zero) const {
    if (!active) return;
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      reinterpret_cast<std::uint32_t*>(out + lane * kVec)[i] = zero ? 0u : words[i];
    }
  }
};

// Blocks that a multiprocessor has registers for: as many as the kernel can have without spilling.
// Left to itself the compiler spills a few registers to reach the next whole block.
template <int kHeads, int kVec>
inline constexpr int kFinishBlocks = kHeads == 1 && kVec <= 4 ? 4
                                     : kHeads * kVec <= 4     ? (kVec == 2 && kHeads == 2 ? 5 : 6)
                                     : kHeads * kVec <= 8     ? (kHeads == 4   ? 3
                                                                 : kHeads == 1 ? 4
                                                                               : 5)
                                     : kHeads * kVec <= 16    ? (kHeads == 8 ? 3 : 4)
                                     : kHeads == 4            ? 3
                                                              : 2;

template <class T, class Kv, int kHeads, int kVec>
__global__ void __launch_bounds__(kFinishWarps * 32, (kFinishBlocks<kHeads, kVec>))
    finish(const __grid_constant__ AttentionLaunch launch) {
  const SpecAttentionParams& call = launch.call;
  const StepView& step = call.step;
  const std::int32_t warp = static_cast<std::int32_t>(threadIdx.x >> 5);
  const std::int32_t item = static_cast<std::int32_t>(blockIdx.x) * kFinishWarps + warp;
  const std::int32_t row = item % step.num_rows, part = item / step.num_rows;
  const std::int32_t parts = (launch.group - 1) / kHeads + 1;  // of a KV head
  const std::int32_t kv_head = part / parts;
  if (kv_head >= call.cache.num_kv_heads) return;
  RowFinisher<T, Kv, kHeads, kVec> finisher(
      launch, gpu::dynamic_shared<FinishShared<kHeads>>() + warp, kv_head);
  // Whatever cu_rows holds: the row belongs to a request or to none.
  const std::int32_t b = cuda::find_request(step, row);
  const bool known = b < step.num_requests && step.cu_rows[b] <= row && row < step.cu_rows[b + 1];
  const RequestView request = known ? request_view(step, b) : RequestView{b, row, 0, 0, false};
  const std::int32_t token = row - request.first_row;
  // A request that the plan has flagged has no jobs.
  bool good = known && launch.work.job_begin[b] < launch.work.job_begin[b + 1];
  bool path = true;
  std::int32_t position = request.kv_len + token;
  const std::uint32_t* mask = mask_of(step, request, token);
  if (good && request.tree) {
    position = tree_position(step, request, row);
    good = path = is_path(call, request, token, position, mask);
  }

  // No tail in fast mode. It is never empty in exact mode: a row sees itself.
  std::int32_t num_tail = 0;
  if (good && call.exact) {
    num_tail = find_tail(launch, request, kv_head, mask, row_keys(launch, position),
                         finisher.shared->offsets);
  }
  const std::int32_t h = (part - kv_head * parts) * kHeads;
  const std::int32_t head = kv_head * launch.group + h;
  finisher.heads = min(kHeads, launch.group - h);
  T* out = static_cast<T*>(call.out) + row * call.out_row_stride +
           head * static_cast<std::int64_t>(call.cache.head_dim);
  finisher.clear();
  if (num_tail > 0) {
    const T* q = static_cast<const T*>(call.q) + row * call.q_row_stride +
                 head * static_cast<std::int64_t>(call.cache.head_dim);
    finisher.score_tail(q, num_tail);
  }
  const StatesOfHeads<kHeads> states =
      good ? finisher.find_states(request, token * launch.group + h) : StatesOfHeads<kHeads>{};

  gpu::grid_dependency_wait();
  std::uint32_t flags = known ? launch.work.request_flags[b] : 0u;
  if (!path && flags == 0) flags = kStatusBadTree;
  good = good && flags == 0;
  if (good) {
    finisher.fold_states(states);
    if (num_tail > 0) finisher.sum_tail(num_tail);
  }
  // Not earlier: a product that begins asks for megabytes of weights at once, and the loads of
  // states and then of the tail's values would stand behind them.
  gpu::launch_dependents();
  if (good) {
    if (finisher.write(out, head, states)) flags |= kStatusNaN;
  } else {
    const std::uint32_t zeros[kVec / 2] = {};
    for (std::int32_t i = 0; i < finisher.heads; ++i) {
      finisher.store(out + i * call.cache.head_dim, zeros, true);
    }
  }
  if (flags != 0 && finisher.lane == 0 && call.exec.status != nullptr) {
    atomicOr(&call.exec.status[b], flags);
  }
}

template <class T, class Kv, int kHeads>
void launch_finish_heads(const AttentionLaunch& launch) {
  const std::int32_t head_dim = launch.call.cache.head_dim;
  void (*kernel)(AttentionLaunch) = head_dim <= 64    ? finish<T, Kv, kHeads, 2>
                                    : head_dim <= 128 ? finish<T, Kv, kHeads, 4>
                                                      : finish<T, Kv, kHeads, 8>;
  const std::int32_t parts = (launch.group - 1) / kHeads + 1;
  const std::int32_t warps = launch.call.step.num_rows * launch.call.cache.num_kv_heads * parts;
  if (warps == 0) return;
  gpu::launch(kernel, dim3((warps + kFinishWarps - 1) / kFinishWarps), dim3(kFinishWarps * 32),
              kFinishWarps * sizeof(FinishShared<kHeads>), launch.call.exec.stream,
              {.dependent = true}, launch);
}

// For rows of T over pages of Kv.
template <class T, class Kv>
void launch_finish_types(const AttentionLaunch& launch) {
  // The main pass has a block for each multiprocessor.
  const std::int64_t parts =
      std::int64_t{launch.call.step.num_rows} * launch.call.cache.num_kv_heads;
  const auto run_at_once = [&](std::int32_t heads, int blocks) {
    const std::int64_t warps = parts * ((launch.group - 1) / heads + 1);
    return warps <= std::int64_t{launch.work.num_blocks} * kFinishWarps * blocks;
  };
  if (launch.group == 1 || run_at_once(1, kFinishBlocks<1, 4>)) {
    return launch_finish_heads<T, Kv, 1>(launch);
  }
  if (launch.group == 2 || run_at_once(2, kFinishBlocks<2, 4>)) {
    return launch_finish_heads<T, Kv, 2>(launch);
  }
  if (launch.group <= 4 || run_at_once(4, kFinishBlocks<4, 4>)) {
    return launch_finish_heads<T, Kv, 4>(launch);
  }
  launch_finish_heads<T, Kv, 8>(launch);
}

}  // namespace specdec::attention
