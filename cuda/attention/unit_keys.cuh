// The keys of a unit.
#pragma once

#include <cstdint>

#include "attention/spec_attention.h"
#include "gpu/gpu.cuh"

namespace specdec::attention {

// The main keys of a unit, and the blocks they lie in: [first_block(), end_block()). A chunk with
// keys of both, sink tokens and window, has the blocks between them, too, though not their keys.
struct UnitKeys {
  std::int32_t first;       // least key
  std::int32_t begin, end;  // its keys
  std::int32_t sink_end;    // from `first` on those before it are keys besides; 0: no others

  __device__ __forceinline__ UnitKeys(const Job& job, std::int32_t first_chunk,
                                      std::int32_t end_chunk)
      : first(max(job.first_key, chunk_begin(first_chunk))),
        begin(first),
        end(min(job.end_key, chunk_begin(end_chunk))),
        sink_end(0) {
    if (first >= job.hole_end) return;
    if (first >= job.hole_begin) {
      first = begin = job.hole_end;
    } else if (end <= job.hole_end) {
      end = min(end, job.hole_begin);
    } else {
      sink_end = job.hole_begin;
      begin = job.hole_end;
    }
  }
  __device__ __forceinline__ UnitKeys(const Job& job, const Unit& unit)
      : UnitKeys(job, unit.first_chunk, unit.end_chunk) {}

  __device__ __forceinline__ std::int32_t first_block() const { return first / kBlockKeys; }
  __device__ __forceinline__ std::int32_t end_block() const {
    return (end + kBlockKeys - 1) / kBlockKeys;
  }
  // Is it one of the unit's, which has its block?
  __device__ __forceinline__ bool has(std::int32_t key) const {
    return (key >= begin && key < end) || key < sink_end;
  }
  // Is one of [key, key + count), which share a page?
  __device__ __forceinline__ bool has_some(std::int32_t key, std::int32_t count) const {
    return (key + count > begin && key < end) || (key < sink_end && key + count > first);
  }
  // May the block hold keys that do not belong to the unit?
  __device__ __forceinline__ bool is_partial(std::int32_t block) const {
    return block * kBlockKeys < begin || (block + 1) * kBlockKeys > end;
  }
};

// Chunks of a job between its sink tokens and its window: [begin, end). No unit goes across; end
// may be begin. Without: both the job's end.
struct ChunkGap {
  std::int32_t begin, end;

  __device__ __forceinline__ explicit ChunkGap(const Job& job)
      : begin(job.end_chunk), end(job.end_chunk) {
    if (job.hole_begin >= job.hole_end) return;
    const std::int32_t behind_sinks = chunk_of(job.hole_begin - 1) + 1;
    const std::int32_t window = chunk_of(job.hole_end);
    if (window < behind_sinks) return;  // one chunk has keys of both
    begin = behind_sinks;
    end = window;
  }
};

}  // namespace specdec::attention
