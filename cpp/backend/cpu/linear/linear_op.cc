#include "backend/cpu/linear/linear_op.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "algo/e4m3_row.h"
#include "backend/cpu/e4m3.h"
#include "backend/cpu/half.h"
#include "base/thread_pool.h"

namespace specdec::cpu {
namespace {

constexpr std::int32_t kChain = 64;  // products of one running sum

float element(const void* base, DType dtype, std::int64_t at) {
  switch (dtype) {
    case DType::kBF16:
      return bf16_to_float(static_cast<const std::uint16_t*>(base)[at]);
    case DType::kF16:
      return f16_to_float(static_cast<const std::uint16_t*>(base)[at]);
    default:
      return static_cast<const float*>(base)[at];
  }
}

void store(float value, void* base, DType dtype, std::int64_t at) {
  switch (dtype) {
    case DType::kBF16:
      static_cast<std::uint16_t*>(base)[at] = float_to_bf16(value);
      return;
    case DType::kF16:
      static_cast<std::uint16_t*>(base)[at] = float_to_f16(value);
      return;
    default:
      static_cast<float*>(base)[at] = value;
  }
}

void widen_row(const void* base, DType dtype, std::int64_t first, std::int32_t count, float* to) {
  for (std::int32_t k = 0; k < count; ++k) to[k] = element(base, dtype, first + k);
}

// Column n of a packed weight, each element rounded to the call's dtype.
void widen_packed(const LinearParams& p, std::int64_t n, float* to) {
  const PackedLayout& layout = packed_layout(p.format);
  const auto column = static_cast<std::int32_t>(n % PackedLayout::kColumns);
  const auto* tile =
      static_cast<const std::uint8_t*>(p.weight) +
      n / PackedLayout::kColumns * PackedLayout::depth_tiles(p.depth) * layout.tile_bytes();
  for (std::int32_t k = 0; k < p.depth; ++k) {
    const std::int32_t at = k % PackedLayout::kDepth;
    if (k > 0 && at == 0) tile += layout.tile_bytes();
    const std::int32_t half = layout.number_at(column, at);
    int number = tile[half / 2];
    if (layout.bits == 4) number = half % 2 == 0 ? number & 15 : number >> 4;
    const auto factor = [&](std::int32_t offset) {
      const std::uint8_t* from = tile + offset + layout.scale_at(column, at);
      if (layout.is_wide) {
        float wide;
        std::memcpy(&wide, from, sizeof(wide));
        return wide;
      }
      std::uint16_t bits;
      std::memcpy(&bits, from, sizeof(bits));
      return f16_to_float(bits);
    };
    float value = p.format == WeightFormat::kF8_G || p.format == WeightFormat::kF8_A8
                      ? e4m3_to_float(static_cast<std::uint8_t>(number))
                      : static_cast<float>(number - layout.zero);
    value *= factor(layout.number_bytes());
    if (layout.has_minimum) value += factor(layout.number_bytes() + layout.scale_bytes());
    to[k] = p.dtype == DType::kBF16 ? bf16_to_float(float_to_bf16(value))
                                    : f16_to_float(float_to_f16(value));
  }
}

// The row's numbers in place of its elements; the scale is returned.
float round_to_e4m3(float* x, std::int32_t depth) {
  std::uint32_t largest = 0;  // bits of a magnitude: those of a NaN are larger than any
  for (std::int32_t k = 0; k < depth; ++k) {
    largest = std::max(largest, std::bit_cast<std::uint32_t>(x[k]) & 0x7fffffffu);
  }
  const float scale = e4m3_scale(std::bit_cast<float>(largest));
  for (std::int32_t k = 0; k < depth; ++k) x[k] = e4m3_nearest(x[k] / scale);
  return scale;
}

float dot(const float* a, const float* b, std::int32_t depth) {
  float total = 0.0f;
  for (std::int32_t k = 0; k < depth; k += kChain) {
    float chain = 0.0f;
    const std::int32_t end = k + kChain < depth ? k + kChain : depth;
    for (std::int32_t i = k; i < end; ++i) chain += a[i] * b[i];
    total += chain;
  }
  return total;
}

}  // namespace

void linear(const LinearParams& p) {
  std::vector<float> x(static_cast<std::size_t>(p.rows) * static_cast<std::size_t>(p.depth));
  for (std::int64_t r = 0; r < p.rows; ++r) {
    widen_row(p.x, p.dtype, r * p.x_row_stride, p.depth, x.data() + r * p.depth);
  }
  std::vector<float> scales(static_cast<std::size_t>(p.rows), 1.0f);
  for (std::int64_t r = 0; r < p.rows && p.format == WeightFormat::kF8_A8; ++r) {
    scales[static_cast<std::size_t>(r)] = round_to_e4m3(x.data() + r * p.depth, p.depth);
  }
  const std::int64_t column_ns = std::int64_t{p.depth} * (p.rows + 1);
  ThreadPool::global().run_items(p.columns, column_ns, [&](Range columns, int) {
    std::vector<float> weight(static_cast<std::size_t>(p.depth));
    for (std::int64_t n = columns.begin; n < columns.end; ++n) {
      if (p.format != WeightFormat::kElements) {
        widen_packed(p, n, weight.data());
      } else {
        widen_row(p.weight, p.dtype, n * p.weight_row_stride, p.depth, weight.data());
      }
      for (std::int64_t r = 0; r < p.rows; ++r) {
        float sum = dot(x.data() + r * p.depth, weight.data(), p.depth);
        sum *= scales[static_cast<std::size_t>(r)];
        if (p.bias != nullptr) sum += element(p.bias, p.dtype, n);
        store(sum, p.out, p.dtype, r * p.out_row_stride + n);
      }
    }
  });
}

}  // namespace specdec::cpu
