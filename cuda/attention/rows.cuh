// What the rows of a job may see in the main pass.
//
// A row's keys are a range of token slots, and in fast mode, in a tree, its ancestors among the
// step's own rows besides. In exact mode slots are positions: all main keys are committed.
#pragma once

#include <cstdint>

#include "attention/spec_attention.h"
#include "gpu/gpu.cuh"

namespace specdec::attention {

// The scale of q.k with K as it is stored.
__device__ __forceinline__ float score_scale(const SpecAttentionParams& call,
                                             std::int32_t kv_head) {
  return call.k_scale == nullptr ? call.scale
                                 : call.scale * call.k_scale[kv_head * call.scale_stride];
}

// And V's.
__device__ __forceinline__ float value_scale(const SpecAttentionParams& call,
                                             std::int32_t kv_head) {
  return call.v_scale == nullptr ? 1.0f : call.v_scale[kv_head * call.scale_stride];
}

struct RequestView {
  std::int32_t index, first_row, rows, kv_len;
  bool tree;
};

__device__ __forceinline__ RequestView request_view(const StepView& step, std::int32_t b) {
  const std::int32_t first_row = step.cu_rows[b];
  return {b, first_row, step.cu_rows[b + 1] - first_row, step.kv_len[b], step.is_tree[b] != 0};
}

// The mask of step row `token` of a request; null in a chain, whose mask need not exist.
__device__ __forceinline__ const std::uint32_t* mask_of(const StepView& step,
                                                        const RequestView& request,
                                                        std::int32_t token) {
  if (!request.tree) return nullptr;
  return step.mask + (request.first_row + token) * std::int64_t{kMaskWords};
}

// The slots that a row sees: [begin, end), sink tokens in front of `begin`, and slots kv_len + j
// whose bit j is set in `drafts`: of a tree, its ancestors within the window.
struct RowSlots {
  std::int32_t begin, end;
  std::uint64_t drafts[2];
};
static_assert(kMaskWords == 4, "as many bits");

// Bits [begin, end) of 64, either bound anywhere.
__device__ __forceinline__ std::uint64_t bit_range(std::int32_t begin, std::int32_t end) {
  const std::uint64_t below_end = end >= 64 ? ~0ull : end <= 0 ? 0ull : (1ull << end) - 1;
  const std::uint64_t below_begin = begin >= 64 ? ~0ull : begin <= 0 ? 0ull : (1ull << begin) - 1;
  return below_end & ~below_begin;
}

// The number of the `index`-th set bit of a mask row (from 0); there must be one.
__device__ __forceinline__ std::int32_t nth_ancestor(const std::uint64_t (&mask)[2],
                                                     std::int32_t index) {
  for (std::int32_t half = 0; half < 2; ++half) {
    std::uint64_t bits = mask[half];
    const std::int32_t count = __popcll(bits);
    if (index >= count) {
      index -= count;
      continue;
    }
    while (index-- > 0) bits &= bits - 1;
    return half * 64 + __ffsll(static_cast<long long>(bits)) - 1;
  }
  return kMaxStepTokens;
}

// The position of a tree's row: positions[], or if the step has none the number of its ancestors.
__device__ __forceinline__ std::int32_t tree_position(const StepView& step,
                                                      const RequestView& request,
                                                      std::int32_t row) {
  if (step.positions != nullptr) return step.positions[row];
  const std::uint32_t* mask = mask_of(step, request, row - request.first_row);
  std::int32_t position = request.kv_len - 1;  // a row is among its own bits
#pragma unroll
  for (std::int32_t word = 0; word < kMaskWords; ++word) position += __popc(mask[word]);
  return position;
}

// What a row at `position` sees.
__device__ __forceinline__ RowKeys row_keys(const AttentionLaunch& launch, std::int32_t position) {
  const SpecAttentionParams& call = launch.call;
  return exact_row_keys(position, call.max_depth, launch.granule, call.sliding_window,
                        call.sink_tokens, call.first_key);
}

// For step row `token` of a request.
__device__ __forceinline__ RowSlots row_slots(const AttentionLaunch& launch,
                                              const RequestView& request, std::int32_t token) {
  const SpecAttentionParams& call = launch.call;
  const std::int32_t row = request.first_row + token;
  const std::int32_t position =
      request.tree ? tree_position(call.step, request, row) : request.kv_len + token;
  if (call.exact) {
    const RowKeys keys = row_keys(launch, position);
    return {keys.main_begin, keys.main_end, {}};
  }
  const std::int32_t begin =
      first_visible(position, call.sliding_window, call.sink_tokens, call.first_key);
  if (!request.tree) return {begin, position + 1, {}};
  const std::uint32_t* mask = mask_of(call.step, request, token);
  RowSlots slots = {begin, request.kv_len, {}};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    slots.drafts[half] = mask[2 * half] | static_cast<std::uint64_t>(mask[2 * half + 1]) << 32;
  }
  if (begin > request.kv_len) {
    // Ancestors ascend in depth, so that a window cuts off the first of them; but of a text that is
    // shorter than its sink tokens the very first are some.
    const std::int32_t sinks = call.sink_tokens - request.kv_len;
    const std::int32_t hidden_begin = sinks > 0 ? nth_ancestor(slots.drafts, sinks) : 0;
    const std::int32_t hidden_end = nth_ancestor(slots.drafts, begin - request.kv_len);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      slots.drafts[half] &= ~bit_range(hidden_begin - half * 64, hidden_end - half * 64);
    }
  }
  return slots;
}

// Bit i: may the row see slot first_slot + i?
__device__ __forceinline__ std::uint64_t visible_slots(const RowSlots& slots, std::int32_t kv_len,
                                                       std::int32_t sink_tokens,
                                                       std::int32_t first_slot) {
  std::uint64_t visible = bit_range(slots.begin - first_slot, slots.end - first_slot);
  if (slots.begin > 0) visible |= bit_range(0, min(sink_tokens, slots.end) - first_slot);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int32_t at = kv_len + half * 64 - first_slot;  // of its first bit in this block
    if (at >= 0 && at < 64) visible |= slots.drafts[half] << at;
    if (at < 0 && at > -64) visible |= slots.drafts[half] >> -at;
  }
  return visible;
}

}  // namespace specdec::attention
