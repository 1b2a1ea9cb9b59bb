// Where a slot of the paged K/V lies, and its elements as float32 whatever they are stored as.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "backend/cpu/decoder/row_ops.h"
#include "backend/cpu/e4m3.h"
#include "backend/cpu/half.h"
#include "backend/step_view.h"

namespace specdec::cpu {

inline constexpr int kMaxHeadDim = 256;

// Bytes from the start of the pool to slot `slot` of request `b`, first head, of one layer.
inline std::int64_t slot_offset(const StepView& step, const KvCacheView& cache, int layer, int b,
                                std::int32_t slot) {
  const int shift = std::countr_zero(static_cast<unsigned>(cache.page_size));
  const std::int64_t page =
      step.page_table[static_cast<std::int64_t>(b) * step.page_table_stride + (slot >> shift)];
  return (layer * cache.stride_layer + page * cache.stride_page +
          (slot & (cache.page_size - 1)) * cache.stride_token) *
         static_cast<std::int64_t>(dtype_bytes(cache.dtype));
}

// The element-wise ones serve floats and e4m3; int8 pages hold whole vectors (RowOps).
inline float read_element(DType dtype, const char* at) {
  if (dtype == DType::kF8E4M3) return e4m3_to_float(static_cast<std::uint8_t>(*at));
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// One head of one row as it is stored, rounded to nearest even; e4m3 holds x / scale. `to` has
// kv_row_bytes.
inline void write_vector(DType dtype, const float* x, float scale, int head_dim, char* to) {
  switch (dtype) {
    case DType::kBF16:
      return row_ops().f32_to_bf16(x, head_dim, reinterpret_cast<std::uint16_t*>(to));
    case DType::kF16:
      return row_ops().f32_to_f16(x, head_dim, reinterpret_cast<std::uint16_t*>(to));
    case DType::kF8E4M3:
      return row_ops().f32_to_e4m3(x, head_dim, scale, reinterpret_cast<std::uint8_t*>(to));
    case DType::kI8:
      return row_ops().f32_to_int8(x, head_dim, reinterpret_cast<std::int8_t*>(to));
    default:
      std::memcpy(to, x, head_dim * sizeof(float));
  }
}

// What a head's numbers are divided by before they are stored: 1 unless they are stored as e4m3.
inline float storage_scale(const KvCacheView& cache, const float* scales, std::int32_t stride,
                           int kv_head) {
  return cache.dtype == DType::kF8E4M3 && scales != nullptr ? scales[kv_head * stride] : 1.0f;
}

}  // namespace specdec::cpu
