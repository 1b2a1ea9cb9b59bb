// Pieces of the plan kernel: sums over a block, and what a job or a request needs.
#pragma once

#include <cstdint>

#include "attention/rows.cuh"
#include "attention/unit_keys.cuh"
#include "gpu/gpu.cuh"

namespace specdec::attention {

inline constexpr int kPlanThreads = 1024;

// Row tiles of a stream that may lie side by side.
inline constexpr std::int32_t kMaxLanes = 32;

struct PlanShared {
  std::int64_t warp_sums[kPlanThreads / 32];
  std::int64_t lane_begin[kMaxLanes + 1];  // on the line of costs
};

// Sum of the values of all threads before this one; `total` of all. Every thread calls it.
template <class Sum>
__device__ __forceinline__ Sum block_scan(Sum value, PlanShared* shared, Sum* total) {
  const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Sum inclusive = gpu::warp_scan(value);
  if (lane == 31) shared->warp_sums[warp] = inclusive;
  __syncthreads();
  static_assert(kPlanThreads == 32 * 32, "one lane for each warp");
  const Sum sums = gpu::warp_scan(static_cast<Sum>(shared->warp_sums[lane]));
  *total = __shfl_sync(kAllLanes, sums, 31);
  const Sum before = warp == 0 ? 0 : __shfl_sync(kAllLanes, sums, warp - 1);
  __syncthreads();  // warp_sums may be written again
  return before + inclusive - value;
}

// The largest value of all threads. Every thread calls it.
__device__ __forceinline__ std::int32_t block_max(std::int32_t value, PlanShared* shared) {
  const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  value = __reduce_max_sync(kAllLanes, value);
  if (lane == 0) shared->warp_sums[warp] = value;
  __syncthreads();
  value = __reduce_max_sync(kAllLanes, static_cast<std::int32_t>(shared->warp_sums[lane]));
  __syncthreads();  // warp_sums may be written again
  return value;
}

// Checks one request, a warp together: its lengths, and the pages that no job of the main pass
// looks at before the finish kernel reads them. Returns StatusFlag bits.
__device__ __forceinline__ std::uint32_t check_request(const AttentionLaunch& launch,
                                                       const RequestView& request) {
  const SpecAttentionParams& call = launch.call;
  const std::int64_t keys = std::int64_t{request.kv_len} + request.rows;
  if (request.rows < 0 || request.kv_len < 0 || request.first_row < 0 ||
      std::int64_t{request.first_row} + request.rows > call.step.num_rows ||
      keys > std::int64_t{call.step.page_table_stride} << launch.page_shift) {
    return kStatusBadLength;
  }
  if (request.rows == 0) return 0;
  if (request.tree && request.rows > kMaxStepTokens) return kStatusBadTree;
  const RowKeys first = row_keys(launch, request.kv_len);
  const std::int32_t* pages =
      call.step.page_table + std::int64_t{request.index} * call.step.page_table_stride;
  bool bad = false;
  const auto check = [&](std::int32_t begin, std::int64_t end) {  // keys
    const std::int32_t end_page = static_cast<std::int32_t>((end - 1) >> launch.page_shift) + 1;
    for (std::int32_t i =
             (begin >> launch.page_shift) + static_cast<std::int32_t>(threadIdx.x & 31);
         i < end_page; i += 32) {
      bad = bad || pages[i] < 0 || pages[i] >= call.cache.num_pages;
    }
  };
  check(first.tail_begin, keys);
  // Sink tokens of the tail: at least those of the first row's.
  if (call.sink_tokens > first.main_end) {
    check(first.main_end, min(std::int64_t{call.sink_tokens}, keys));
  }
  return __any_sync(kAllLanes, bad) != 0 ? kStatusBadPage : 0u;
}

// The request of a job: the last that begins at or before it (those without jobs begin where the
// next one does).
__device__ __forceinline__ std::int32_t request_of(const std::int32_t* job_begin,
                                                   std::int32_t num_requests, std::int32_t job) {
  std::int32_t low = 0, high = num_requests;  // job_begin[low] <= job < job_begin[high]
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    (job_begin[middle] <= job ? low : high) = middle;
  }
  return low;
}

// A job without its slots. Its keys are those of its first to its last row; for a tree the bounds
// of any tree of that many rows, so that no position has to be read.
__device__ __forceinline__ Job make_job(const AttentionLaunch& launch, const RequestView& request,
                                        std::int32_t index_in_request) {
  const SpecAttentionParams& call = launch.call;
  const std::int32_t num_rows = request.rows * launch.group;
  const std::int32_t row_blocks = (num_rows + launch.row_tile - 1) / launch.row_tile;
  Job job = {};
  job.request = request.index;
  job.kv_head = index_in_request / row_blocks;
  job.row_block = index_in_request % row_blocks;
  const std::int32_t first_row = job.row_block * launch.row_tile;
  const std::int32_t last_row = min(first_row + launch.row_tile, num_rows) - 1;
  std::int32_t first = request.kv_len, last = request.kv_len;  // positions
  if (!request.tree) {
    first += first_row / launch.group;
    last += last_row / launch.group;
  } else if (call.exact) {
    last += min(call.max_depth, request.rows - 1);
  } else {
    last += request.rows - 1;  // slots, rather
  }
  const std::int32_t begin = row_keys(launch, first).main_begin;
  const std::int32_t end = call.exact ? row_keys(launch, last).main_end : last + 1;
  // A window that begins behind the sink tokens leaves them apart.
  const std::int32_t sink_end = begin > 0 ? min(call.sink_tokens, end) : 0;
  if (begin < end) {
    job.first_key = sink_end > 0 ? 0 : begin;
    job.end_key = end;
    if (sink_end > 0) job.hole_begin = sink_end, job.hole_end = begin;
  } else if (sink_end > 0) {
    job.end_key = sink_end;
  } else {
    return job;
  }
  job.first_chunk = chunk_of(job.first_key);
  job.end_chunk = chunk_of(job.end_key - 1) + 1;
  return job;
}

// What a job costs besides its key blocks, in key blocks: queries, states.
inline constexpr std::int32_t kJobCost = 1;

// Key blocks of chunks of a job that lie on one side of its gap.
__device__ __forceinline__ std::int32_t key_blocks(const Job& job, std::int32_t first_chunk,
                                                   std::int32_t end_chunk) {
  const UnitKeys keys(job, first_chunk, end_chunk);
  return keys.end_block() - keys.first_block();
}

__device__ __forceinline__ std::int32_t num_chunks(const Job& job) {
  const ChunkGap gap(job);
  return gap.begin - job.first_chunk + job.end_chunk - gap.end;
}

__device__ __forceinline__ std::int32_t job_cost(const Job& job) {
  if (job.first_chunk == job.end_chunk) return 0;
  const ChunkGap gap(job);
  const std::int32_t blocks = kJobCost + key_blocks(job, job.first_chunk, gap.begin);
  return gap.end < job.end_chunk ? blocks + key_blocks(job, gap.end, job.end_chunk) : blocks;
}

// Jobs in the order in which they lie on the line of all costs. With one lane in that of their
// numbers, row tiles fastest. With as many lanes as every request has row tiles, all streams' first
// tiles, then all second ones: tiles of one stream (request and KV head) have one place on every
// lane, and blocks that stand at it read the same K/V at the same time.
struct Order {
  std::int32_t lanes = 1, streams = 0;  // streams: of several lanes

  __device__ __forceinline__ std::int32_t lane_of(std::int32_t place) const {
    return lanes == 1 ? 0 : place / streams;
  }
  __device__ __forceinline__ std::int32_t job_at(std::int32_t place) const {
    return lanes == 1 ? place : place % streams * lanes + place / streams;
  }
};

// Deals out the line of each lane, one job after another, in equal shares of its blocks: a piece
// goes to the block in whose share its middle lies.
struct Dealer {
  std::int64_t share;
  std::int32_t width;  // blocks of a lane
  bool fits_32_bits;   // twice the end of a lane: a division of 64 bits takes five times as long
  std::int32_t first = 0;  // block of the lane
  bool by_chunk = false;   // there are blocks for all chunks: each costs 1, and a share is 1

  __device__ __forceinline__ std::int32_t block_of(std::int64_t begin, std::int32_t cost) const {
    const std::int64_t middle = 2 * begin + cost;
    const std::int64_t block =
        fits_32_bits ? static_cast<std::uint32_t>(middle) / static_cast<std::uint32_t>(2 * share)
                     : middle / (2 * share);
    return first + (block < width ? static_cast<std::int32_t>(block) : width - 1);
  }
};

__device__ __forceinline__ std::int32_t cost_of(const Job& job, const Dealer& dealer) {
  return dealer.by_chunk ? num_chunks(job) : job_cost(job);
}

// Would whole jobs keep the blocks about as busy as equal shares? Then cutting them is not worth
// the states that it leaves: each costs the traffic of several key blocks, written and read again.
__device__ __forceinline__ bool whole_jobs_suffice(std::int32_t lane_jobs,
                                                   std::int32_t largest_cost,
                                                   const Dealer& dealer) {
  constexpr std::int64_t kSlackPercent = 118;
  const std::int64_t rounds = (lane_jobs + dealer.width - 1) / dealer.width;
  return rounds * largest_cost * 100 <= dealer.share * kSlackPercent;
}

// Cuts a job that begins at `begin` of the line into units and calls
// emit(block, first_chunk, end_chunk, states) for each in order.
template <class Emit>
__device__ __forceinline__ void cut_job(const Job& job, std::int64_t begin, const Dealer& dealer,
                                        bool whole, Emit&& emit) {
  if (job.first_chunk == job.end_chunk) return;
  const ChunkGap gap(job);
  const auto emit_chunks = [&](std::int32_t block, std::int32_t first, std::int32_t end) {
    const bool begins = first == job.first_chunk;
    const UnitStates states = begins ? UnitStates::kOne : UnitStates::kOnePerChunk;
    if (first >= gap.end) return emit(block, first, end, states);
    if (end <= gap.end) return emit(block, first, min(end, gap.begin), states);
    emit(block, first, gap.begin, begins ? UnitStates::kHandsOn : states);
    emit(block, gap.end, end, states);
  };
  std::int32_t block = dealer.block_of(begin, cost_of(job, dealer));
  if (whole) return emit_chunks(block, job.first_chunk, job.end_chunk);
  std::int32_t unit_begin = job.first_chunk;
  for (std::int32_t chunk = job.first_chunk; chunk < job.end_chunk; ++chunk) {
    if (chunk == gap.begin) chunk = gap.end;
    const std::int32_t piece = dealer.by_chunk ? 1
                                               : key_blocks(job, chunk, chunk + 1) +
                                                     (chunk == job.first_chunk ? kJobCost : 0);
    const std::int32_t owner = dealer.block_of(begin, piece);
    begin += piece;
    if (chunk != job.first_chunk && owner != block) {
      emit_chunks(block, unit_begin, chunk);
      unit_begin = chunk;
    }
    block = owner;
  }
  emit_chunks(block, unit_begin, job.end_chunk);
}

// States that a unit leaves.
__device__ __forceinline__ std::int32_t unit_slots(std::int32_t first_chunk, std::int32_t end_chunk,
                                                   UnitStates states) {
  if (states == UnitStates::kOnePerChunk) return end_chunk - first_chunk;
  return states == UnitStates::kOne ? 1 : 0;
}

}  // namespace specdec::attention
