// Pages of K/V: their sizes, how wide a token's vector is in them, and how many a text takes.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace specdec {

inline constexpr int kMaxPageSize = 128;  // tokens

constexpr bool is_page_size(std::int64_t tokens) {
  return tokens >= 1 && tokens <= kMaxPageSize && (tokens & (tokens - 1)) == 0;
}

// What K and V may be stored as.
constexpr bool is_kv_dtype(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16 ||
         dtype == DType::kF8E4M3 || dtype == DType::kI8;
}

// A token's K (or V) of one head in the pages: the last axis, in elements of the pages' dtype. An
// int8 vector is followed by the float32 that its numbers are multiplied by.
inline constexpr int kVectorScaleBytes = 4;
constexpr int kv_row_width(DType dtype, int head_dim) {
  return dtype == DType::kI8 ? head_dim + kVectorScaleBytes : head_dim;
}
constexpr std::int64_t kv_row_bytes(DType dtype, int head_dim) {
  return kv_row_width(dtype, head_dim) * static_cast<std::int64_t>(dtype_bytes(dtype));
}
// The head dim of pages whose last axis has `width` elements.
constexpr std::int64_t head_dim_of(DType dtype, std::int64_t width) {
  return width - kv_row_width(dtype, 0);
}

constexpr std::int64_t pages_for(std::int64_t tokens, std::int64_t page_size) {
  return tokens / page_size + (tokens % page_size != 0);  // no sum that could overflow
}

// Which tokens the rows of a text see. A row at position p: those from p - window + 1 on and the
// first `sink_tokens`; window 0: all.
struct AttentionSpan {
  std::int64_t window = 0, sink_tokens = 0;
};

// Pages that a text holds at most while nothing is written further than `rows` tokens behind the
// first row that is still to be computed, and what no row sees any more is given back.
constexpr std::int64_t pages_at_once(AttentionSpan span, std::int64_t rows,
                                     std::int64_t page_size) {
  return pages_for(span.sink_tokens, page_size) +
         pages_for(span.window - 1 + rows + page_size - 1, page_size);
}

// Places of a request's page table: the longest text, and one step whose rows are all drafts.
constexpr int pages_per_request(int max_seq_len, int page_size) {
  return static_cast<int>(pages_for(std::int64_t{max_seq_len} + kMaxStepTokens, page_size));
}

}  // namespace specdec
