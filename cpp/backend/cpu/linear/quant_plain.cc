// Plain C++: the fallback of every machine, and what the other tables are tested against.
#include <cmath>
#include <cstring>

#include "backend/cpu/half.h"
#include "backend/cpu/linear/quant_kernels.h"

namespace specdec::cpu {
namespace {

template <WeightType kType>
int code_at(const std::byte* step, int k, int column) {
  if constexpr (quant_format(kType).nibbles) {
    const int quad = k % 16;
    const auto byte = static_cast<int>(step[quad / 4 * 128 + 4 * column + quad % 4]);
    return k < 16 ? byte & 15 : byte >> 4;
  } else {
    return static_cast<int>(step[k / 4 * 128 + 4 * column + k % 4]);
  }
}

template <WeightType kType>
float scale_at(const std::byte* step, int set, int column) {
  constexpr QuantFormat kFormat = quant_format(kType);
  const std::byte* scales = step + kFormat.codes_bytes();
  const int index = set * 32 + column;
  if constexpr (kFormat.wide_scales) {
    float value;
    std::memcpy(&value, scales + 4 * index, sizeof(value));
    return value;
  } else {
    std::uint16_t bits;
    std::memcpy(&bits, scales + 2 * index, sizeof(bits));
    return f16_to_float(bits);
  }
}

// What one block of x adds to a sum: see quant_kernels.h.
template <WeightType kType>
float add_block(float sum, const std::byte* step, const QuantBlock& x, int column) {
  constexpr QuantFormat kFormat = quant_format(kType);
  constexpr int kSets = kFormat.two_scales ? 2 : 1;
  constexpr int kSetLength = kGroup / kSets;
  for (int set = 0; set < kSets; ++set) {
    std::int32_t products = 0;
    for (int k = set * kSetLength; k < (set + 1) * kSetLength; ++k) {
      products += (code_at<kType>(step, k, column) - kFormat.zero()) * x.q[k];
    }
    const float factor = scale_at<kType>(step, set, column) * x.scale;
    sum = std::fma(static_cast<float>(products), factor, sum);
  }
  if (kFormat.has_min) sum = std::fma(scale_at<kType>(step, kSets, column), x.scaled_sum, sum);
  return sum;
}

template <WeightType kType>
void plain_tile(const QuantTileArgs& args) {
  constexpr std::int64_t kStepBytes = quant_format(kType).step_bytes();
  for (int m = 0; m < args.rows; ++m) {
    const auto* x = reinterpret_cast<const QuantBlock*>(args.x + m * args.x_row_bytes);
    for (int c = 0; c < 32; ++c) {
      float sum = 0.0f;
      for (std::int64_t i = 0; i < args.steps; ++i) {
        const std::byte* step = args.panel + i * kStepBytes;
        sum = add_block<kType>(sum, step, x[2 * i], c);
        if (x[2 * i].has_rest != 0) sum = add_block<kType>(sum, step, x[2 * i + 1], c);
      }
      args.y[m * args.y_stride + c] = args.bias != nullptr ? sum + args.bias[c] : sum;
    }
  }
}

}  // namespace

const QuantKernels& quant_kernels_plain() {
  static constexpr QuantKernels kernels = {
      &plain_tile<WeightType::kQ8_0>, &plain_tile<WeightType::kQ4_0>,
      &plain_tile<WeightType::kQ4_1>, &plain_tile<WeightType::kQ4K>,
      &plain_tile<WeightType::kQ5K>,  &plain_tile<WeightType::kQ6K>,
      &plain_tile<WeightType::kQ8G>};
  return kernels;
}

}  // namespace specdec::cpu
