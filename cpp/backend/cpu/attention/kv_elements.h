// Where a slot of the paged K/V lies, and its elements as float32 whatever they are stored as.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "backend/cpu/e4m3.h"
#include "backend/cpu/half.h"
#include "backend/step_view.h"

namespace specdec::cpu {

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

// Rounds to nearest even.
inline void write_element(DType dtype, float value, char* at) {
  if (dtype == DType::kF8E4M3) {
    *at = static_cast<char>(float_to_e4m3(value));
    return;
  }
  if (dtype == DType::kF32) {
    std::memcpy(at, &value, sizeof(value));
    return;
  }
  const std::uint16_t bits = dtype == DType::kBF16 ? float_to_bf16(value) : float_to_f16(value);
  std::memcpy(at, &bits, sizeof(bits));
}

// What a head's numbers are divided by before they are stored: 1 unless they are stored as e4m3.
inline float storage_scale(const KvCacheView& cache, const float* scales, std::int32_t stride,
                           int kv_head) {
  return cache.dtype == DType::kF8E4M3 && scales != nullptr ? scales[kv_head * stride] : 1.0f;
}

}  // namespace specdec::cpu
