// The CPU operations on the paged K/V: speculative attention, append, compaction; and the argmax.
//
// `x(params)` deals the work out over ThreadPool::global() and returns when it is done.
// `x_part(params, range)` does the items of a range, for callers that deal themselves.
//
// Nothing here allocates in a part, validates or throws (parameters are checked at the edge).
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/ops.h"
#include "base/thread_pool.h"

namespace specdec::cpu {

// Bytes of scratch that covers every spec_attention_part call whose requests have at most
// `max_keys` tokens each (kv_len + rows), with these heads. Any alignment; one block for all ranks.
std::size_t spec_attention_scratch_bytes(std::int64_t max_keys, int num_heads, int num_kv_heads,
                                         int head_dim, int nranks);

// Whether a call that need not be exact ever differs from one that must.
bool has_fast_attention(DType kv_dtype, std::int64_t head_dim);

// The first form brings its scratch, for as many ranks as the pool has threads; the second keeps
// one per calling thread and reports to params.exec.status.
void spec_attention(const SpecAttentionParams& params, void* scratch);
void spec_attention(const SpecAttentionParams& params);

void append_kv_part(const AppendKvParams& params, Range rows);
void append_kv(const AppendKvParams& params);

// Head dims up to 256.
void rope_append_kv_part(const RopeAppendKvParams& params, Range rows);
void rope_append_kv(const RopeAppendKvParams& params);

// Within a layer rows move in ascending order, so the copies are safe.
void compact_kv_part(const CompactKvParams& params, Range layers);
void compact_kv(const CompactKvParams& params);

void argmax_part(const ArgmaxParams& params, Range rows);
void argmax(const ArgmaxParams& params);

}  // namespace specdec::cpu
