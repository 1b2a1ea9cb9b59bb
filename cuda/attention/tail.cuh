// Which keys a row adds after the main pass, and where they lie.
//
// Positions [tail_begin, tail_end) of arithmetic.h: what is committed lies at slot = position;
// then, in a tree, come the row's ancestors, whose ascending mask bits are in position order.
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

// Writes the places of the tail keys, position tail_begin first.
__device__ __forceinline__ void find_tail(const AttentionLaunch& launch, const RequestView& request,
                                          std::int32_t kv_head, const std::uint32_t* mask,
                                          std::int32_t tail_begin, std::int32_t tail_end,
                                          std::int64_t* offsets) {
  const SpecAttentionParams& call = launch.call;
  const KvCacheView& cache = call.cache;
  const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x & 31);
  const std::int32_t* pages =
      call.step.page_table + std::int64_t{request.index} * call.step.page_table_stride;
  const auto put = [&](std::int32_t position, std::int32_t slot) {
    offsets[position - tail_begin] = pages[slot >> launch.page_shift] * cache.stride_page +
                                     kv_head * cache.stride_head +
                                     (slot & (cache.page_size - 1)) * cache.stride_token;
  };
  const std::int32_t in_order = request.tree ? min(request.kv_len, tail_end) : tail_end;
  for (std::int32_t x = tail_begin + lane; x < in_order; x += 32) put(x, x);
  if (request.tree && in_order < tail_end) {
    std::int32_t position = request.kv_len;  // of the next ancestor
#pragma unroll
    for (int word = 0; word < kMaskWords; ++word) {
      const std::uint32_t bits = mask[word];
      const std::int32_t mine = position + __popc(bits & ((1u << lane) - 1));
      if ((bits >> lane & 1) != 0 && mine >= tail_begin) {
        put(mine, request.kv_len + word * 32 + lane);
      }
      position += __popc(bits);
    }
  }
  __syncwarp();
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
