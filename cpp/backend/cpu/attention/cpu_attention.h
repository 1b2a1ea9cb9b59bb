// The CPU operations on the paged K/V: speculative attention, append, compaction; and the argmax.
//
// Two forms of each. `x(params)` opens a region of ThreadPool::global() and returns when done.
// `x_part(params, ..., rank, nranks)` is one rank's share, for callers that already are inside a
// region: every rank calls it with the same params. A part returns as soon as its own share is
// done; the caller puts a barrier before anything that reads another rank's results.
//
// Nothing here allocates in a part, validates or throws (parameters are checked at the edge).
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/ops.h"

namespace specdec::cpu {

// Bytes of scratch that covers every spec_attention_part call whose requests have at most
// `max_keys` tokens each (kv_len + rows), with these heads. Any alignment; one block for all ranks.
std::size_t spec_attention_scratch_bytes(std::int64_t max_keys, int num_heads, int num_kv_heads,
                                         int head_dim, int nranks);

// Must run inside a region of ThreadPool::global() with nranks == its size (or nranks == 1, in any
// thread): short contexts are shared out by keys and head dims, with pool barriers in between.
// `scratch` is the same pointer on every rank.
void spec_attention_part(const SpecAttentionParams& params, void* scratch, int rank, int nranks);
void spec_attention(const SpecAttentionParams& params);

void append_kv_part(const AppendKvParams& params, int rank, int nranks);
void append_kv(const AppendKvParams& params);

// Shared out over rows. Head dims up to 256.
void rope_append_kv_part(const RopeAppendKvParams& params, int rank, int nranks);
void rope_append_kv(const RopeAppendKvParams& params);

// Shared out over layers; within a layer rows move in ascending order, so the copies are safe.
void compact_kv_part(const CompactKvParams& params, int rank, int nranks);
void compact_kv(const CompactKvParams& params);

// Shared out over rows.
void argmax_part(const ArgmaxParams& params, int rank, int nranks);
void argmax(const ArgmaxParams& params);

}  // namespace specdec::cpu
