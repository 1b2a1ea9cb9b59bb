// Parameter structs of the device operations. Every operation fills caller-owned outputs, allocates
// nothing and does not validate: shapes are checked once, at the edge (bind/, engine/).
#pragma once

#include <cstdint>

#include "backend/step_view.h"
#include "base/types.h"

namespace specdec {

// Writes the K/V of all step rows into the pages, row i of request b at slot kv_len[b] + i.
struct AppendKvParams {
  StepView step;
  KvCacheView cache;
  std::int32_t layer = 0;
  const void* k = nullptr;  // [R, G, K], dtype `dtype`; rows `k_row_stride` elements apart
  const void* v = nullptr;  // [R, G, K]
  std::int64_t k_row_stride = 0, v_row_stride = 0;
  DType dtype = DType::kF32;
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
  float softcap = 0.0f;          // 0: none. Else scores become softcap * tanh(score / softcap).
  const float* sinks = nullptr;  // [H] extra logit per head that only enlarges the denominator
};

// Moves the K/V of accepted draft rows to their final slots, for all layers:
// slot kv_len[b] + path[i] -> slot kv_len[b] + 1 + i, for i in [0, path_len[b]).
// path is increasing and path[i] >= 1 + i, so the moves are safe in ascending order.
struct CompactKvParams {
  StepView step;
  KvCacheView cache;
  const std::int32_t* path = nullptr;      // [B, kMaxStepTokens] row indices within the request
  const std::int32_t* path_len = nullptr;  // [B] accepted drafts; 0: nothing to move
};

// ids[i] = index of the largest of scores[i, 0..vocab), the first on ties. A row that holds a NaN
// gets id -1.
struct ArgmaxParams {
  const float* scores = nullptr;  // [rows, vocab], rows `row_stride` elements apart
  std::int64_t row_stride = 0;
  std::int32_t rows = 0, vocab = 0;
  TokenId* ids = nullptr;  // [rows]
};

}  // namespace specdec
