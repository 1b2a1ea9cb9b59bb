// How the elements of a weight are stored: a float type, one of GGUF's block formats, or one of
// four of our own for checkpoints that GGUF's cannot hold.
//
// A block format cuts a row into blocks of 32, 64 or 256 elements. In all but two, 32 successive
// elements are small whole numbers u with one or two scales and perhaps a minimum:
//   w = scale * (u - zero) + min
// where zero is fixed by the format. That is all the packed layout and the kernels know of it. The
// exceptions are f8_g and f8_a8: elements are e4m3, 64 of them share a scale, and products are
// those of bf16. They differ in the inputs that the products take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/types.h"

namespace specdec::cpu {

enum class WeightType : std::uint8_t {
  kF32,
  kF16,
  kBF16,
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ4K,
  kQ5K,
  kQ6K,
  kQ4G,
  kQ8G,
  kF8G,
  kF8A8
};

// float32, float16, bfloat16, or the format's GGUF name in lower case: q8_0 ... q6_k. q4_g is q4_1
// and q8_g is q8_0 with float32 in the place of float16; f8_g is a float32 scale and 64 e4m3 codes,
// and so is f8_a8, whose inputs are rounded to e4m3 (algo/e4m3_row.h).
const char* weight_type_name(WeightType type);
// The inverse, for block formats alone; std::invalid_argument names those there are.
WeightType block_format_named(const std::string& name);

constexpr bool is_block_format(WeightType type) { return type >= WeightType::kQ8_0; }
constexpr bool is_e4m3(WeightType type) {
  return type == WeightType::kF8G || type == WeightType::kF8A8;
}
// Blocks of whole numbers, which meet inputs rounded to 8 bits; see quant_kernels.h.
constexpr bool is_quantised(WeightType type) { return is_block_format(type) && !is_e4m3(type); }
constexpr DType float_dtype(WeightType type) {
  return type == WeightType::kF16    ? DType::kF16
         : type == WeightType::kBF16 ? DType::kBF16
                                     : DType::kF32;
}

inline constexpr int kGroup = 32;  // elements that share what a row of x shares: its scale

inline constexpr int kScaledGroup = 64;  // e4m3 elements that share a scale
// 64 k of a panel of 32 columns in e4m3: the columns' scales and then their codes.
constexpr std::int64_t scaled_group_bytes() { return 32 * (4 + kScaledGroup); }

// A block as the file has it.
struct BlockSize {
  std::int64_t elements, bytes;
};
BlockSize block_size(WeightType type);

// What is kept of 32 elements in a pack; without loss for every format.
struct QuantFormat {
  bool nibbles;      // u takes 4 bits, else 8
  bool two_scales;   // one for each 16 elements, else one
  int zero_shift;    // zero = 1 << zero_shift; -1: zero = 0
  bool has_min;      // a minimum beside the scale
  bool wide_scales;  // scales and minimum are float32, else float16

  constexpr int zero() const { return zero_shift < 0 ? 0 : 1 << zero_shift; }
  // Bytes of 32 elements of 32 columns: u, then the scales, then the minima.
  constexpr std::int64_t codes_bytes() const { return nibbles ? 512 : 1024; }
  constexpr std::int64_t step_bytes() const {
    return codes_bytes() + 32 * (wide_scales ? 4 : 2) * ((two_scales ? 2 : 1) + (has_min ? 1 : 0));
  }
};
constexpr QuantFormat quant_format(WeightType type) {
  switch (type) {
    case WeightType::kQ4_0:
      return {true, false, 3, false, false};
    case WeightType::kQ4_1:
      return {true, false, -1, true, false};
    case WeightType::kQ4K:
    case WeightType::kQ4G:
      return {true, false, -1, true, true};
    case WeightType::kQ8G:
      return {false, false, 7, false, true};
    case WeightType::kQ5_1:
    case WeightType::kQ5K:
      return {false, false, -1, true, true};
    case WeightType::kQ6K:
      return {false, true, 5, false, true};
    default:  // q8_0; q5_0 as it
      return {false, false, 7, false, false};
  }
}

// 32 elements of a row, taken out of its blocks; codes are e4m3 where is_e4m3().
struct Group {
  std::uint8_t codes[kGroup];
  float scale[2];  // of the first and the last 16
  float min;
};
// Elements [32 index, 32 index + 32) of a row in a block format.
Group read_group(WeightType type, const std::byte* row, std::int64_t index);

// out[32] = scale * (u - zero) + min, each product and sum rounded to float32; scale * code where
// is_e4m3().
void group_values(WeightType type, const Group& group, float* out);

}  // namespace specdec::cpu
