// Append and compaction of the paged K/V, and the argmax over score rows.
#include <bit>
#include <cstring>

#include "backend/cpu/attention/attention_kernels.h"
#include "backend/cpu/attention/cpu_attention.h"
#include "backend/cpu/half.h"
#include "base/thread_pool.h"

namespace specdec::cpu {
namespace {

// Bytes from the start of the pool to slot `slot` of request `b`, first head, of one layer.
std::int64_t slot_offset(const StepView& step, const KvCacheView& cache, int layer, int b,
                         std::int32_t slot) {
  const int shift = std::countr_zero(static_cast<unsigned>(cache.page_size));
  const std::int64_t page =
      step.page_table[static_cast<std::int64_t>(b) * step.page_table_stride + (slot >> shift)];
  return (layer * cache.stride_layer + page * cache.stride_page +
          (slot & (cache.page_size - 1)) * cache.stride_token) *
         static_cast<std::int64_t>(dtype_bytes(cache.dtype));
}

float read(DType dtype, const char* at) {
  std::uint16_t bits;
  float value;
  if (dtype == DType::kF32) {
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  std::memcpy(&bits, at, sizeof(bits));
  return dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

void write(DType dtype, float value, char* at) {
  if (dtype == DType::kF32) {
    std::memcpy(at, &value, sizeof(value));
    return;
  }
  const std::uint16_t bits = dtype == DType::kBF16 ? float_to_bf16(value) : float_to_f16(value);
  std::memcpy(at, &bits, sizeof(bits));
}

// One head of one row; a change of type goes through float32 and rounds to nearest even.
void copy_head(const char* from, DType from_type, char* to, DType to_type, int head_dim) {
  const std::size_t from_size = dtype_bytes(from_type), to_size = dtype_bytes(to_type);
  if (from_type == to_type) {
    std::memcpy(to, from, head_dim * from_size);
    return;
  }
  for (int d = 0; d < head_dim; ++d) {
    write(to_type, read(from_type, from + d * from_size), to + d * to_size);
  }
}

}  // namespace

void append_kv_part(const AppendKvParams& p, int rank, int nranks) {
  const StepView& step = p.step;
  const KvCacheView& cache = p.cache;
  const std::int64_t size = static_cast<std::int64_t>(dtype_bytes(p.dtype));
  const std::int64_t cache_size = static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  const int begin = static_cast<int>(std::int64_t{step.num_rows} * rank / nranks);
  const int end = static_cast<int>(std::int64_t{step.num_rows} * (rank + 1) / nranks);
  int b = 0;
  for (int row = begin; row < end; ++row) {
    while (step.cu_rows[b + 1] <= row) ++b;
    const std::int64_t to =
        slot_offset(step, cache, p.layer, b, step.kv_len[b] + row - step.cu_rows[b]);
    const char* k = static_cast<const char*>(p.k) + row * p.k_row_stride * size;
    const char* v = static_cast<const char*>(p.v) + row * p.v_row_stride * size;
    for (int g = 0; g < cache.num_kv_heads; ++g) {
      const std::int64_t from = g * std::int64_t{cache.head_dim} * size;
      const std::int64_t at = to + g * cache.stride_head * cache_size;
      copy_head(k + from, p.dtype, static_cast<char*>(cache.k) + at, cache.dtype, cache.head_dim);
      copy_head(v + from, p.dtype, static_cast<char*>(cache.v) + at, cache.dtype, cache.head_dim);
    }
  }
}

void append_kv(const AppendKvParams& p) {
  ThreadPool& pool = ThreadPool::global();
  pool.run([&](int rank) { append_kv_part(p, rank, pool.size()); });
}

void compact_kv_part(const CompactKvParams& p, int rank, int nranks) {
  const StepView& step = p.step;
  const KvCacheView& cache = p.cache;
  const std::size_t head_bytes = cache.head_dim * dtype_bytes(cache.dtype);
  const std::int64_t head_stride =
      cache.stride_head * static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  char* k = static_cast<char*>(cache.k);
  char* v = static_cast<char*>(cache.v);
  const int begin = static_cast<int>(std::int64_t{cache.num_layers} * rank / nranks);
  const int end = static_cast<int>(std::int64_t{cache.num_layers} * (rank + 1) / nranks);
  for (int layer = begin; layer < end; ++layer) {
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
  bool moves = false;
  for (int b = 0; b < p.step.num_requests && !moves; ++b) {
    // The path increases, so its last entry tells whether anything is out of place.
    const int n = p.path_len[b];
    moves = n > 0 && p.path[static_cast<std::int64_t>(b) * kMaxStepTokens + n - 1] != n;
  }
  if (!moves) return;
  ThreadPool& pool = ThreadPool::global();
  pool.run([&](int rank) { compact_kv_part(p, rank, pool.size()); });
}

void argmax_part(const ArgmaxParams& p, int rank, int nranks) {
  const auto row_argmax = attention_kernels().argmax;
  const int begin = static_cast<int>(std::int64_t{p.rows} * rank / nranks);
  const int end = static_cast<int>(std::int64_t{p.rows} * (rank + 1) / nranks);
  for (int row = begin; row < end; ++row) {
    p.ids[row] = row_argmax(p.scores + row * p.row_stride, p.vocab);
  }
}

void argmax(const ArgmaxParams& p) {
  ThreadPool& pool = ThreadPool::global();
  pool.run([&](int rank) { argmax_part(p, rank, pool.size()); });
}

}  // namespace specdec::cpu
