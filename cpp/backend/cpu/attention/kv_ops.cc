// Append and compaction of the paged K/V, and the argmax over score rows.
#include <algorithm>
#include <cstring>

#include "backend/cpu/attention/attention_kernels.h"
#include "backend/cpu/attention/cpu_attention.h"
#include "backend/cpu/attention/kv_elements.h"
#include "backend/cpu/decoder/row_ops.h"
#include "base/pages.h"
#include "base/thread_pool.h"

namespace specdec::cpu {
namespace {

// One head of one row; a change of type goes through float32 and rounds to nearest even.
void copy_head(const char* from, DType from_type, float scale, char* to, DType to_type,
               int head_dim) {
  const std::size_t from_size = dtype_bytes(from_type);
  if (from_type == to_type) {
    std::memcpy(to, from, head_dim * from_size);
    return;
  }
  float wide[kMaxHeadDim];
  const float* x = reinterpret_cast<const float*>(from);
  if (from_type != DType::kF32) {
    for (int d = 0; d < head_dim; ++d) wide[d] = read_element(from_type, from + d * from_size);
    x = wide;
  }
  write_vector(to_type, x, scale, head_dim, to);
}

}  // namespace

void append_kv_part(const AppendKvParams& p, Range rows) {
  const StepView& step = p.step;
  const KvCacheView& cache = p.cache;
  const std::int64_t size = static_cast<std::int64_t>(dtype_bytes(p.dtype));
  const std::int64_t cache_size = static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  // Rows behind the last request's are padding.
  const auto end =
      static_cast<int>(std::min<std::int64_t>(rows.end, step.cu_rows[step.num_requests]));
  int b = 0;
  for (auto row = static_cast<int>(rows.begin); row < end; ++row) {
    while (step.cu_rows[b + 1] <= row) ++b;
    const std::int64_t to =
        slot_offset(step, cache, p.layer, b, step.kv_len[b] + row - step.cu_rows[b]);
    const char* k = static_cast<const char*>(p.k) + row * p.k_row_stride * size;
    const char* v = static_cast<const char*>(p.v) + row * p.v_row_stride * size;
    for (int g = 0; g < cache.num_kv_heads; ++g) {
      const std::int64_t from = g * std::int64_t{cache.head_dim} * size;
      const std::int64_t at = to + g * cache.stride_head * cache_size;
      copy_head(k + from, p.dtype, storage_scale(cache, p.k_scale, p.scale_stride, g),
                static_cast<char*>(cache.k) + at, cache.dtype, cache.head_dim);
      copy_head(v + from, p.dtype, storage_scale(cache, p.v_scale, p.scale_stride, g),
                static_cast<char*>(cache.v) + at, cache.dtype, cache.head_dim);
    }
  }
}

void append_kv(const AppendKvParams& p) {
  const std::int64_t row_ns = std::int64_t{p.cache.num_kv_heads} * p.cache.head_dim / 4;
  ThreadPool::global().run_items(p.step.num_rows, row_ns,
                                 [&](Range rows, int) { append_kv_part(p, rows); });
}

void compact_kv_part(const CompactKvParams& p, Range layers) {
  const StepView& step = p.step;
  const KvCacheView& cache = p.cache;
  const auto head_bytes = static_cast<std::size_t>(kv_row_bytes(cache.dtype, cache.head_dim));
  const std::int64_t head_stride =
      cache.stride_head * static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  char* k = static_cast<char*>(cache.k);
  char* v = static_cast<char*>(cache.v);
  for (auto layer = static_cast<int>(layers.begin); layer < layers.end; ++layer) {
    for (int b = 0; b < step.num_requests; ++b) {
      const std::int32_t* path = p.path + static_cast<std::int64_t>(b) * kMaxStepTokens;
      for (int i = 0; i < p.path_len[b]; ++i) {
        if (path[i] == i + 1) continue;  // a chain is in place
        const std::int64_t from = slot_offset(step, cache, layer, b, step.kv_len[b] + path[i]);
        const std::int64_t to = slot_offset(step, cache, layer, b, step.kv_len[b] + 1 + i);
        for (int g = 0; g < cache.num_kv_heads; ++g) {
          std::memcpy(k + to + g * head_stride, k + from + g * head_stride, head_bytes);
          std::memcpy(v + to + g * head_stride, v + from + g * head_stride, head_bytes);
        }
      }
    }
  }
}

void compact_kv(const CompactKvParams& p) {
  std::int64_t moved = 0;
  for (int b = 0; b < p.step.num_requests; ++b) {
    // The path increases, so its last entry tells whether anything is out of place.
    const int n = p.path_len[b];
    if (n > 0 && p.path[static_cast<std::int64_t>(b) * kMaxStepTokens + n - 1] != n) moved += n;
  }
  if (moved == 0) return;
  const std::int64_t token_ns = std::int64_t{p.cache.num_kv_heads} * p.cache.head_dim / 4;
  ThreadPool::global().run_items(p.cache.num_layers, moved * token_ns,
                                 [&](Range layers, int) { compact_kv_part(p, layers); });
}

namespace {

// A 16-bit row, widened block by block.
TokenId argmax_16bit(const std::uint16_t* scores, DType dtype, std::int32_t n) {
  constexpr std::int32_t kBlock = 1024;
  const RowOps& ops = row_ops();
  const auto widen = dtype == DType::kBF16 ? ops.bf16_to_f32 : ops.f16_to_f32;
  const auto row_argmax = attention_kernels().argmax;
  float block[kBlock], best = 0.0f;
  TokenId id = -1;
  for (std::int32_t from = 0; from < n; from += kBlock) {
    const std::int32_t count = std::min(kBlock, n - from);
    widen(scores + from, count, block);
    const TokenId at = row_argmax(block, count);
    if (at < 0) return -1;
    if (id < 0 || block[at] > best) {
      best = block[at];
      id = from + at;
    }
  }
  return id;
}

}  // namespace

void argmax_part(const ArgmaxParams& p, Range rows) {
  const auto row_argmax = attention_kernels().argmax;
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    if (p.dtype == DType::kF32) {
      p.ids[row] = row_argmax(static_cast<const float*>(p.scores) + row * p.row_stride, p.vocab);
    } else {
      p.ids[row] = argmax_16bit(static_cast<const std::uint16_t*>(p.scores) + row * p.row_stride,
                                p.dtype, p.vocab);
    }
  }
}

void argmax(const ArgmaxParams& p) {
  const std::int64_t row_ns = p.vocab / 8;
  ThreadPool::global().run_items(p.rows, row_ns, [&](Range rows, int) { argmax_part(p, rows); });
}

}  // namespace specdec::cpu
