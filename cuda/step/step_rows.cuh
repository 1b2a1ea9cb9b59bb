// Which request a row belongs to and where its tokens lie, from arrays that only the device can
// read. Whatever they hold, no address outside the pool and the step's arrays is formed.
#pragma once

#include <cstdint>

#include "backend/ops.h"

namespace specdec::cuda {

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x & 31u); }

// Called by one lane, or by several with the same flag.
__device__ __forceinline__ void report(std::uint32_t* status, int request, std::uint32_t flags) {
  if (status != nullptr && flags != 0) atomicOr(status + request, flags);
}

// The request of a row, by a whole warp: as many requests end at or before the row. B for the rows
// behind the last request. All loads are independent, so it takes the time of one.
__device__ __forceinline__ int find_request(const StepView& step, int row) {
  int before = 0;
#pragma unroll 4
  for (int base = 0; base < step.num_requests; base += 32) {
    const int b = base + lane_id();
    const bool ends = b < step.num_requests && step.cu_rows[b + 1] <= row;
    before += __popc(__ballot_sync(kAllLanes, ends));
  }
  return before;
}

// A request's place in the step. All zero and not `valid` if lengths are negative or beyond the
// arrays (the page table only where the step has one).
struct RequestRows {
  std::int32_t first = 0, count = 0, kv_len = 0;
  bool valid = false;
};

__device__ __forceinline__ RequestRows request_rows(const StepView& step, int b,
                                                    std::int32_t page_size) {
  const std::int32_t first = step.cu_rows[b], end = step.cu_rows[b + 1], kv_len = step.kv_len[b];
  const std::int64_t capacity = step.page_table != nullptr
                                    ? std::int64_t{step.page_table_stride} * page_size
                                    : std::int64_t{INT32_MAX};
  const bool valid = first >= 0 && end >= first && end <= step.num_rows && kv_len >= 0 &&
                     std::int64_t{kv_len} + (end - first) <= capacity;
  return valid ? RequestRows{first, end - first, kv_len, true} : RequestRows{};
}

// page_size is a power of two.
__device__ __forceinline__ int page_shift(std::int32_t page_size) { return __ffs(page_size) - 1; }

// The page that holds a token slot of a request; -1 if the table's entry is outside the pool.
__device__ __forceinline__ std::int32_t page_of(const StepView& step, int b, std::int32_t slot,
                                                int shift, std::int32_t num_pages) {
  const std::int32_t page =
      step.page_table[std::int64_t{b} * step.page_table_stride + (slot >> shift)];
  return page >= 0 && page < num_pages ? page : -1;
}

// Where a step row's K/V goes.
struct RowPlace {
  int request;          // B: no request's row, nothing to do
  std::int32_t slot;    // within the request
  std::int32_t page;    // -1: nowhere
  std::uint32_t flags;  // why not
};

__device__ __forceinline__ RowPlace find_row(const StepView& step, const KvCacheView& cache,
                                             int row) {
  const int b = find_request(step, row);
  if (b == step.num_requests) return {b, 0, -1, 0};
  const RequestRows rows = request_rows(step, b, cache.page_size);
  if (!rows.valid || row < rows.first) return {b, 0, -1, kStatusBadLength};
  const std::int32_t slot = rows.kv_len + row - rows.first;
  const std::int32_t page = page_of(step, b, slot, page_shift(cache.page_size), cache.num_pages);
  return {b, slot, page, page < 0 ? kStatusBadPage : 0u};
}

// Elements from the start of the pool to a slot's first head.
__device__ __forceinline__ std::int64_t slot_elements(const KvCacheView& cache, int layer,
                                                      std::int32_t page, std::int32_t slot) {
  return layer * cache.stride_layer + page * cache.stride_page +
         (slot & (cache.page_size - 1)) * cache.stride_token;
}

}  // namespace specdec::cuda
