// RMSNorm, rotary embedding and append of the step's q, k, v, head by head in float32, with the
// arithmetic of the native decoder (decoder/row_ops.h).
#include <algorithm>
#include <atomic>

#include "backend/cpu/attention/cpu_attention.h"
#include "backend/cpu/attention/kv_elements.h"
#include "backend/cpu/decoder/row_ops.h"
#include "base/thread_pool.h"

namespace specdec::cpu {
namespace {

void read_head(DType dtype, const char* from, int head_dim, float* x) {
  const std::size_t size = dtype_bytes(dtype);
  for (int d = 0; d < head_dim; ++d) x[d] = read_element(dtype, from + d * size);
}

void rotate(const RopeAppendKvParams& p, std::int64_t position, float* x) {
  const float* cos = p.cos + position * p.rope_row_stride;
  const float* sin = p.sin + position * p.rope_row_stride;
  const int pairs = p.rotary_dim / 2;
  if (!p.interleaved) return row_ops().rope(cos, sin, pairs, x);
  for (int i = 0; i < pairs; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

// A head's norm weights as float32; null where there is no norm.
struct NormWeight {
  NormWeight(const RopeAppendKvParams& p, const void* weight) : present(weight != nullptr) {
    if (!present) return;
    read_head(p.norm_dtype, static_cast<const char*>(weight), p.cache.head_dim, w);
    if (!p.norm_plus_one) return;
    for (int d = 0; d < p.cache.head_dim; ++d) w[d] += 1.0f;
  }
  bool present;
  float w[kMaxHeadDim];
};

}  // namespace

void rope_append_kv_part(const RopeAppendKvParams& p, Range rows) {
  const StepView& step = p.step;
  const KvCacheView& cache = p.cache;
  const int head_dim = cache.head_dim;
  const std::int64_t size = static_cast<std::int64_t>(dtype_bytes(p.dtype));
  const std::int64_t cache_size = static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  // Rows behind the last request's are padding.
  const auto end =
      static_cast<int>(std::min<std::int64_t>(rows.end, step.cu_rows[step.num_requests]));
  const NormWeight q_norm(p, p.q_norm), k_norm(p, p.k_norm);
  float x[kMaxHeadDim];
  int b = 0;
  for (auto row = static_cast<int>(rows.begin); row < end; ++row) {
    while (step.cu_rows[b + 1] <= row) ++b;
    const std::int32_t position = step.positions[row];
    const bool inside = p.rotary_dim == 0 || (position >= 0 && position < p.max_positions);
    const auto transform = [&](const char* from, const NormWeight& norm) {
      read_head(p.dtype, from, head_dim, x);
      if (norm.present) row_ops().rms_norm_f32(x, norm.w, head_dim, p.norm_eps, x);
      if (p.rotary_dim > 0) rotate(p, position, x);
    };
    for (int h = 0; h < p.num_heads; ++h) {
      const std::int64_t at = h * std::int64_t{head_dim};
      if (inside) {
        transform(static_cast<const char*>(p.q) + (row * p.q_row_stride + at) * size, q_norm);
      } else {
        std::fill_n(x, head_dim, 0.0f);
      }
      write_vector(p.dtype, x, 1.0f, head_dim,
                   static_cast<char*>(p.q_out) + (row * p.q_out_row_stride + at) * size);
    }
    if (!inside) {
      if (p.exec.status != nullptr) {  // another thread may hold rows of the same request
        std::atomic_ref(p.exec.status[b]).fetch_or(kStatusBadLength, std::memory_order_relaxed);
      }
      continue;
    }
    const std::int64_t to =
        slot_offset(step, cache, p.layer, b, step.kv_len[b] + row - step.cu_rows[b]);
    for (int g = 0; g < cache.num_kv_heads; ++g) {
      const std::int64_t from = g * std::int64_t{head_dim};
      const std::int64_t at = to + g * cache.stride_head * cache_size;
      transform(static_cast<const char*>(p.k) + (row * p.k_row_stride + from) * size, k_norm);
      write_vector(cache.dtype, x, storage_scale(cache, p.k_scale, p.scale_stride, g), head_dim,
                   static_cast<char*>(cache.k) + at);
      read_head(p.dtype, static_cast<const char*>(p.v) + (row * p.v_row_stride + from) * size,
                head_dim, x);
      write_vector(cache.dtype, x, storage_scale(cache, p.v_scale, p.scale_stride, g), head_dim,
                   static_cast<char*>(cache.v) + at);
    }
  }
}

void rope_append_kv(const RopeAppendKvParams& p) {
  const std::int64_t row_ns =
      std::int64_t{p.num_heads + p.cache.num_kv_heads} * p.cache.head_dim / 2;
  ThreadPool::global().run_items(p.step.num_rows, row_ns,
                                 [&](Range rows, int) { rope_append_kv_part(p, rows); });
}

}  // namespace specdec::cpu
