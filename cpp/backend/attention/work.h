// The work of one attention call, laid out on the device by the plan kernel (cuda/attention/plan)
// from lengths that only the device knows, once per step and kind of layer.
//
// job   one (request, KV head, row block). A row is a (token, query head of the group) pair, token
//       major: row r of a request is token r / (H/G), head g * (H/G) + r % (H/G). A row block is
//       `row_tile` consecutive rows. Jobs are ordered by request, KV head, row block.
// unit  consecutive chunks of one job, walked by one thread block. A unit that begins with the
//       job's first chunk folds all its chunks on chip and leaves one state; any other leaves one
//       state per chunk. So the finish kernel folds a job's states in order. Sink tokens in chunks
//       in front of the window's are units of their own; such a unit may hand its sum on to the
//       next one of its block.
// slot  where a state lies: row_tile x {max, sum} and row_tile x K unnormalised sums, float32. The
//       slots of a job are consecutive and in chunk order. In fast mode a job with one slot leaves
//       its rows' output in place of sums.
// block the persistent thread blocks share out the units beforehand, block i takes units
//       [block_begin[i], block_begin[i + 1]): nothing is handed out at run time, so the work of a
//       call can be walked again by every layer, and producer and consumer warps agree unasked.
//
// Which cuts were made is scheduling: no result bit depends on it.
#pragma once

#include <cstdint>

namespace specdec::attention {

struct Job {
  std::int32_t request, kv_head, row_block;
  std::int32_t first_key, end_key;      // main keys that any of its rows may see; none: equal
  std::int32_t hole_begin, hole_end;    // but for these: behind the sink tokens; none: 0
  std::int32_t first_chunk, end_chunk;  // the chunks that first_key to end_key lie in; none: equal
  std::int32_t first_slot, num_slots;
};

enum class UnitStates : std::int32_t {
  kOnePerChunk,
  kOne,     // all chunks, after what the unit before handed on
  kHandsOn  // none: the next unit goes on with the sum
};

struct Unit {
  std::int32_t job;
  std::int32_t first_chunk, end_chunk;
  std::int32_t slot;   // of its first state
  std::int32_t block;  // that walks it
  UnitStates states;
};

struct WorkHeader {
  std::int32_t num_jobs, num_units, num_slots;
  std::int32_t whole_jobs;  // 1: states would not have fit, so no job was cut
};

// Byte offsets into the workspace, and what fits there. max_units is at least twice max_jobs and
// max_slots max_jobs, so that uncut jobs always fit.
struct WorkLayout {
  std::int64_t header = 0;         // WorkHeader
  std::int64_t jobs = 0;           // Job [max_jobs]
  std::int64_t units = 0;          // Unit [max_units]
  std::int64_t job_begin = 0;      // int32 [B + 1] first job of each request
  std::int64_t block_begin = 0;    // int32 [num_blocks + 1] first unit of each thread block
  std::int64_t request_flags = 0;  // uint32 [B] StatusFlag: the plan and the main pass OR in
  std::int64_t state_ml = 0;       // float [max_slots, row_tile, 2]
  std::int64_t state_o = 0;        // float [max_slots, row_tile, K]
  std::int64_t total_bytes = 0;
  std::int32_t max_jobs = 0, max_units = 0, max_slots = 0;
  std::int32_t num_blocks = 0;  // persistent thread blocks of the main pass
  std::int32_t row_tile = 0, head_dim = 0;
};

}  // namespace specdec::attention
