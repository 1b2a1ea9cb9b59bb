// Parameter structs of the device operations. Every operation fills caller-owned outputs, allocates
// nothing and does not validate: shapes are checked once, at the edge (bind/, engine/).
#pragma once

#include <cstdint>

#include "backend/linear_sums.h"
#include "backend/step_view.h"
#include "base/types.h"

namespace specdec {

// Where an accelerator's operation is enqueued and what it may use. The CPU backend ignores it.
struct ExecutionContext {
  void* stream = nullptr;  // cudaStream_t; null: the default stream
  std::int32_t device = 0;
  void* workspace = nullptr;  // 256-byte aligned scratch, contents arbitrary; null if not needed
  std::int64_t workspace_bytes = 0;
  std::uint32_t* status = nullptr;  // [B] StatusFlag bits, OR-ed in; null: not reported
};

// What a kernel found wrong with one request. Its rows are then zero (attention) or not written;
// other requests are served. A kernel never traps.
enum StatusFlag : std::uint32_t {
  kStatusNaN = 1,        // a row's result holds a NaN or infinity
  kStatusBadPage = 2,    // a page id that the request reaches is outside the pool
  kStatusBadTree = 4,    // parents not in topological order, or a node deeper than max_depth
  kStatusBadLength = 8,  // kv_len or rows negative, or beyond the page table
  kStatusBadLaw = 16,    // temperature, top_k, top_p, min_p or an acceptance rule out of range
  kStatusBadProbs = 32   // probabilities of a draft that are none, or not its own
};

// Writes the K/V of all step rows into the pages, row i of request b at slot kv_len[b] + i. A
// change of dtype rounds to nearest even; e4m3 saturates at 448 and keeps NaN.
struct AppendKvParams {
  StepView step;
  KvCacheView cache;
  std::int32_t layer = 0;
  const void* k = nullptr;  // [R, G, K], dtype `dtype`; rows `k_row_stride` elements apart
  const void* v = nullptr;  // [R, G, K]
  std::int64_t k_row_stride = 0, v_row_stride = 0;
  DType dtype = DType::kF32;
  // As in SpecAttentionParams, for e4m3 pages only: what is stored is k / k_scale.
  const float* k_scale = nullptr;
  const float* v_scale = nullptr;
  std::int32_t scale_stride = 0;
  ExecutionContext exec;
};

// What a layer does between its q/k/v projection and its attention, in one pass: q and k are
// normalised (optional), rotated by the row's absolute position, q is written out, k and v go into
// the pages as AppendKvParams does. All arithmetic is float32 and rounds once, at the store.
//   norm      x * 1/sqrt(mean(x^2) + eps) * w over a head's K elements, before the rotation
//   rotation  (a, b) -> (a cos - b sin, b cos + a sin) for the pairs (i, i + rotary_dim/2), or
//             (2i, 2i + 1) if interleaved; elements from rotary_dim on are left as they are
// A row whose position is outside the tables sets kStatusBadLength: its q_out is zero, its k and v
// are not written.
struct RopeAppendKvParams {
  StepView step;  // positions, cu_rows, kv_len, page_table
  KvCacheView cache;
  std::int32_t layer = 0;
  // Heads K apart; often columns of one fused [R, (H + 2G) K] projection. Strides in elements.
  const void* q = nullptr;  // [R, H, K], dtype `dtype`
  const void* k = nullptr;  // [R, G, K]
  const void* v = nullptr;  // [R, G, K]
  LinearSums sums;          // of such a projection: q, k and v are read from them, if there are any
  void* q_out = nullptr;    // [R, H, K]; may be q itself
  std::int64_t q_row_stride = 0, k_row_stride = 0;
  std::int64_t v_row_stride = 0, q_out_row_stride = 0;
  std::int32_t num_heads = 0;  // H; 0: no q
  DType dtype = DType::kF32;   // of q, k, v, q_out
  const float* cos = nullptr;  // [max_positions, >= rotary_dim/2], attention scaling folded in
  const float* sin = nullptr;  // the same; in one table of [cos | sin] rows: cos + rotary_dim/2
  std::int64_t rope_row_stride = 0;  // elements between rows of either
  std::int32_t max_positions = 0;
  std::int32_t rotary_dim = 0;  // even, at most K; 0: no rotation
  bool interleaved = false;
  const void* q_norm = nullptr;  // [K] weight of q's RMSNorm, dtype `norm_dtype`; null: no norm
  const void* k_norm = nullptr;  // [K] of k's
  DType norm_dtype = DType::kF32;
  float norm_eps = 1e-6f;
  bool norm_plus_one = false;      // w = 1 + weight (Gemma)
  const float* k_scale = nullptr;  // as in AppendKvParams
  const float* v_scale = nullptr;
  std::int32_t scale_stride = 0;
  ExecutionContext exec;
};

// Speculative attention: R packed rows against paged K/V (the step's own K/V already appended).
// softmax(scale * q.k (soft-capped) over the visible keys) * V.
// Bits of a row depend only on its query, the K/V of its visible keys in position order, and the
// layer parameters: not on R, B, threads, pages, nor on the slots its ancestors lie in.
struct SpecAttentionParams {
  StepView step;
  KvCacheView cache;
  std::int32_t layer = 0;
  const void* q = nullptr;  // [R, H, K], head dim contiguous, heads K apart
  void* out = nullptr;      // [R, H, K]
  std::int64_t q_row_stride = 0, out_row_stride = 0;  // elements
  std::int32_t num_heads = 0;                         // H, a multiple of the cache's num_kv_heads
  DType dtype = DType::kF32;                          // of q and out
  float scale = 1.0f;
  // 0: no window. Else a key at position p is visible to a row at position t if t - p < window.
  std::int32_t sliding_window = 0;
  // With a window: the first `sink_tokens` positions are visible, too, however far behind it. No
  // other position in front of the windows is read.
  std::int32_t sink_tokens = 0;
  // Positions in front of it are no keys: nobody has written them. No row lies there, either.
  // Without sink tokens.
  std::int32_t first_key = 0;
  float softcap = 0.0f;          // 0: none. Else scores become softcap * tanh(score / softcap).
  const float* sinks = nullptr;  // [H] extra logit per head that only enlarges the denominator
  // K/V stored as e4m3: the value is the stored number times the scale. Null: 1.
  const float* k_scale = nullptr;  // [G] or [1]
  const float* v_scale = nullptr;
  std::int32_t scale_stride = 0;  // 1: one scale per KV head, 0: one for all
  // Exact: a row's bits do not depend on which part of its path is still a draft, nor on the other
  // rows; see backend/attention/arithmetic.h. On accelerators they do depend on max_depth. A CPU
  // that does not multiply bfloat16 is always exact.
  bool exact = true;
  // The rest is for accelerators alone.
  std::int32_t max_depth = kMaxDraftLen;  // D: no node of a tree lies deeper
  const char* instance = nullptr;         // name of a row of the kernel table; null: the best one
  // The workspace holds the plan of a call that differs in q, out, layer and scales at most. Of
  // what this call reads, the kernel right before it writes q and the step's own K and V alone.
  bool reuse_plan = false;
  ExecutionContext exec;
};

// Moves the K/V of accepted draft rows to their final slots, for all layers:
// slot kv_len[b] + path[i] -> slot kv_len[b] + 1 + i, for i in [0, path_len[b]).
// path is increasing and path[i] >= 1 + i, so the moves are safe in ascending order.
struct CompactKvParams {
  StepView step;
  KvCacheView cache;
  const std::int32_t* path = nullptr;      // [B, kMaxStepTokens] row indices within the request
  const std::int32_t* path_len = nullptr;  // [B] accepted drafts; 0: nothing to move
  ExecutionContext exec;
};

// Derives what a step needs from each request's parents[] where the parents are: positions, mask,
// is_tree and cache slots (cpp/tree/draft_tree.h). Of `step` it reads parents, cu_rows, kv_len and,
// for slots, page_table; the outputs are the arrays that the step's other operations then read.
// A request whose parents are no tree (kStatusBadTree), or a tree of more than kMaxStepTokens rows,
// gets the outputs of a chain; one with bad lengths (kStatusBadLength) position 0, mask 0, slot -1.
// Rows in [cu_rows[B], num_rows), the padding of a graph's bucket, get those too.
struct BuildStepParams {
  StepView step;
  std::int32_t max_depth = kMaxDraftLen;  // a node of a tree that lies deeper: kStatusBadTree
  std::int32_t num_pages = 0;             // of the pool; page ids outside set kStatusBadPage
  std::int32_t page_size = 0;             // a power of two
  std::int32_t* positions = nullptr;      // [R] kv_len + depth
  std::uint32_t* mask = nullptr;    // [R, kMaskWords]; chains too, if of <= kMaxStepTokens rows
  std::uint8_t* is_tree = nullptr;  // [B] 0: every parent is the row before
  // [R] page * page_size + offset of the row's K/V, -1 where the page is bad; null: not needed.
  std::int64_t* slots = nullptr;
  ExecutionContext exec;
};

// Bit (j & 31) of word (j >> 5) of row i = mask[i, j] != 0; bits from `cols` on are 0.
struct PackMaskParams {
  const std::uint8_t* mask = nullptr;              // [rows, cols] bool
  std::int64_t row_stride = 0, column_stride = 1;  // elements
  std::int32_t rows = 0, cols = 0;
  std::uint32_t* words = nullptr;  // [rows, num_words], contiguous
  std::int32_t num_words = 0;      // num_words * 32 >= cols
  ExecutionContext exec;
};

// ids[i] = index of the largest of scores[i, 0..vocab), the first on ties. A row that holds a NaN
// gets id -1. Columns that pad a row to more than `vocab` are not read.
struct ArgmaxParams {
  const void* scores = nullptr;  // [rows, >= vocab], rows `row_stride` elements apart
  std::int64_t row_stride = 0;
  std::int32_t rows = 0, vocab = 0;
  TokenId* ids = nullptr;     // [rows]
  DType dtype = DType::kF32;  // of scores: f32, f16 or bf16
  ExecutionContext exec;
};

}  // namespace specdec
