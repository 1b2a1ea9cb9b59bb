// Which keys a row adds after the main pass, and where they lie.
//
// Positions [tail_begin, tail_end) of arithmetic.h, and sink tokens in front of them that are no
// main keys: what is committed lies at slot = position; then, in a tree, come the row's ancestors,
// whose ascending mask bits are in position order.
#pragma once

#include <cstdint>

#include "attention/rows.cuh"
#include "attention/softmax.cuh"

namespace specdec::attention {

// Tail keys of a row: its own, at most kMaxDraftLen before it that may be drafts, and what is left
// of an instruction's keys.
inline constexpr int kMaxTail = kMaxStepTokens + kGranuleFp8;

// A tree row's mask has to be a path to it: itself the last bit, as many bits as it is deep.
__device__ __forceinline__ bool is_path(const SpecAttentionParams& call, const RequestView& request,
                                        std::int32_t token, std::int32_t position,
                                        const std::uint32_t* mask) {
  std::int32_t count = 0, last = -1;
#pragma unroll
  for (int word = 0; word < kMaskWords; ++word) {
    const std::uint32_t bits = mask[word];
    count += __popc(bits);
    if (bits != 0) last = word * 32 + 31 - __clz(static_cast<int>(bits));
  }
  return last == token && position - request.kv_len == count - 1 &&
         (!call.exact || count - 1 <= call.max_depth);
}

// Writes the places of the tail keys in position order; returns how many there are.
__device__ __forceinline__ std::int32_t find_tail(const AttentionLaunch& launch,
                                                  const RequestView& request, std::int32_t kv_head,
                                                  const std::uint32_t* mask, const RowKeys& keys,
                                                  std::int64_t* offsets) {
  const SpecAttentionParams& call = launch.call;
  const KvCacheView& cache = call.cache;
  const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x & 31);
  const std::int32_t* pages =
      call.step.page_table + std::int64_t{request.index} * call.step.page_table_stride;
  const auto put = [&](std::int32_t key, std::int32_t slot) {
    offsets[key] = pages[slot >> launch.page_shift] * cache.stride_page +
                   kv_head * cache.stride_head +
                   (slot & (cache.page_size - 1)) * cache.stride_token;
  };
  // Positions [main_end, sink_end) lie apart, in front of [tail_begin, tail_end).
  const std::int32_t sink_end = min(call.sink_tokens, keys.tail_begin);
  const std::int32_t num_sinks = max(sink_end - keys.main_end, 0);
  const std::int32_t shift = keys.tail_begin - num_sinks;  // from a position to its key
  const std::int32_t in_order = request.tree ? min(request.kv_len, keys.tail_end) : keys.tail_end;
  for (std::int32_t x = keys.tail_begin + lane; x < in_order; x += 32) put(x - shift, x);
  for (std::int32_t i = lane; i < num_sinks; i += 32) {
    const std::int32_t x = keys.main_end + i;
    if (x < in_order) put(i, x);
  }
  if (request.tree && in_order < keys.tail_end) {
    std::int32_t position = request.kv_len;  // of the next ancestor
#pragma unroll
    for (int word = 0; word < kMaskWords; ++word) {
      const std::uint32_t bits = mask[word];
      const std::int32_t mine = position + __popc(bits & ((1u << lane) - 1));
      if ((bits >> lane & 1) != 0) {
        const std::int32_t slot = request.kv_len + word * 32 + lane;
        if (mine >= keys.tail_begin) {
          put(mine - shift, slot);
        } else if (mine < sink_end) {
          put(mine - keys.main_end, slot);
        }
      }
      position += __popc(bits);
    }
  }
  __syncwarp();
  return keys.tail_end - shift;
}

// Sums eight values over the 32 lanes at once: lane l gets the sum of value l / 4.
__device__ __forceinline__ float transposed_sum(float (&value)[8]) {
  const unsigned lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 4; half >= 1; half /= 2) {  // partner: 16, 8, 4 lanes away
    const bool upper = (lane & (half * 4)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float keep = upper ? value[i + half] : value[i];
      const float give = upper ? value[i] : value[i + half];
      value[i] = keep + __shfl_xor_sync(kAllLanes, give, half * 4);
    }
  }
  value[0] += __shfl_xor_sync(kAllLanes, value[0], 2);
  value[0] += __shfl_xor_sync(kAllLanes, value[0], 1);
  return value[0];
}

}  // namespace specdec::attention
