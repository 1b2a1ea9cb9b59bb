// The geometry of one step as the device operations see it: plain pointers into buffers that were
// made once at their maximum size, so their addresses never change.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace specdec {

// Rows (step tokens) of all requests are packed one request after another. Row r of request b
// attends to the first kv_len[b] tokens of the request's pages and, of the step's own rows, to its
// ancestors and itself. The K/V of the request's i-th row lives at token slot kv_len[b] + i.
struct StepView {
  std::int32_t num_requests = 0;             // B
  std::int32_t num_rows = 0;                 // R
  const TokenId* tokens = nullptr;           // [R]
  const std::int32_t* positions = nullptr;   // [R] absolute position: kv_len + depth in the tree
  const std::int32_t* parents = nullptr;     // [R] within the request: parent's row, -1 for row 0
  const std::uint32_t* mask = nullptr;       // [R, kMaskWords] ancestor bits; valid if is_tree[b]
  const std::int32_t* cu_rows = nullptr;     // [B + 1] first row of each request
  const std::int32_t* kv_len = nullptr;      // [B] tokens in the KV cache before this step
  const std::uint8_t* is_tree = nullptr;     // [B] 0: rows are a causal chain of any length
  const std::int32_t* page_table = nullptr;  // [B, page_table_stride] page ids in token order
  std::int32_t page_table_stride = 0;
  const std::int32_t* logit_rows = nullptr;  // [L] rows whose next-token scores are needed
  std::int32_t num_logit_rows = 0;           // L
  // Upper bounds that the host knows when the arrays above live on a device: they size grids and
  // scratch memory, never results.
  std::int32_t max_rows = 0;    // rows of any one request
  std::int32_t max_kv_len = 0;  // kv_len + rows of any one request
};

// The paged pool, all layers: K and V each [layers, P, G, S, K]; one page of one head is one block.
// Strides are in elements; the head dim is contiguous. In int8 pages a token's vector is wider than
// the head dim (kv_row_width in base/pages.h).
struct KvCacheView {
  void* k = nullptr;
  void* v = nullptr;
  DType dtype = DType::kF32;
  std::int32_t num_layers = 0, num_pages = 0, num_kv_heads = 0, page_size = 0, head_dim = 0;
  std::int64_t stride_layer = 0, stride_page = 0, stride_head = 0, stride_token = 0;
};

}  // namespace specdec
