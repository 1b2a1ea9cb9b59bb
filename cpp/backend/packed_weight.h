// Weights of 8 and 4 bits as the linear layer of a device reads them: numbers, scales and minimums
// of a file's blocks in the order in which mma.sync, and wgmma from registers, take their operand,
// so that a lane has what it multiplies in its own registers (docs/kernels/linear.md).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace specdec {

// kElements: a matrix of the call's dtype. The others stand for
//   weight = (number - zero) * scale, plus a minimum where there is one,
// in float32, one scale and minimum for `group` successive k of a column; the products take it
// rounded to the call's dtype. Numbers of kF8_G are e4m3, and so are those of kF8_A8, whose
// products take x as e4m3, too: see LinearParams.
enum class WeightFormat : std::int32_t {
  kElements,
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ4_G,
  kQ4_K,
  kQ8_G,
  kQ5_K,
  kQ6_K,
  kF8_G,
  kF8_A8,
};

// A tile is 32 columns by 64 k, whole tiles only: [numbers][scales][minimums], every part a
// multiple of 128 bytes. Tiles of one 32 columns follow each other in k, then come the next
// columns. What lies outside of the matrix is zero, scales too.
struct PackedLayout {
  WeightFormat format = WeightFormat::kElements;
  const char* name = "";
  std::int32_t bits = 0;  // of a number
  std::int32_t zero = 0;  // the number that stands for 0, before the minimum
  bool has_minimum = false;
  std::int32_t group = 32;  // k of a scale
  bool is_wide = false;     // float32 scales and minimums; else float16

  static constexpr std::int32_t kColumns = 32;
  static constexpr std::int32_t kDepth = 64;

  constexpr std::int32_t number_bytes() const { return kColumns * kDepth * bits / 8; }
  // All scales of a tile, or all minimums.
  constexpr std::int32_t scale_bytes() const {
    return kColumns * (kDepth / group) * (is_wide ? 4 : 2);
  }
  constexpr std::int32_t tile_bytes() const {
    return number_bytes() + (has_minimum ? 2 : 1) * scale_bytes();
  }
  static constexpr std::int64_t column_tiles(std::int64_t columns) {
    return (columns + kColumns - 1) / kColumns;
  }
  static constexpr std::int64_t depth_tiles(std::int64_t depth) {
    return (depth + kDepth - 1) / kDepth;
  }
  constexpr std::int64_t bytes(std::int64_t columns, std::int64_t depth) const {
    return column_tiles(columns) * depth_tiles(depth) * tile_bytes();
  }

  // In a tile: the half byte in which the number at [column, k] begins. The operand of m16n8k16 has
  // at column c and k of a 16 x 16 fragment: lane 4 (c % 8) + k % 8 / 2, register c / 8 + 2 (k /
  // 8), its lower half for even k. A lane's numbers for 4 (2, of 8 bits) fragments of successive k
  // are 16 bytes: one vector to read.
  constexpr std::int32_t number_at(std::int32_t column, std::int32_t k) const {
    const std::int32_t fragment = column / 16, step = k / 16;
    const std::int32_t lane = column % 8 * 4 + k % 8 / 2;
    const std::int32_t place = (column % 16 / 8 + k % 16 / 8 * 2) * 2 + k % 2;
    const std::int32_t steps = 16 / bits;  // of a vector
    const std::int32_t vector = (fragment * (4 / steps) + step / steps) * 32 + lane;
    return vector * 32 + (step % steps * 8 + place) * (bits / 4);
  }
  // In the scales of a tile: the byte of the one for [column, k]; likewise of the minimum. Those
  // that a lane needs for a group, of 4 columns 8 apart, are one vector.
  constexpr std::int32_t scale_at(std::int32_t column, std::int32_t k) const {
    return (k / group * kColumns + column % 8 * 4 + column / 8) * (is_wide ? 4 : 2);
  }
};

// A minimum is added to the rounded product. kQ4_K and those in front of it hold products that are
// exact: their scales have at most 20 bits (ops.pack_weight).
inline constexpr std::array<PackedLayout, 10> kPackedLayouts{{
    {WeightFormat::kQ8_0, "q8_0", 8, 128, false, 32, false},
    {WeightFormat::kQ4_0, "q4_0", 4, 8, false, 32, false},
    {WeightFormat::kQ4_1, "q4_1", 4, 0, true, 32, false},
    {WeightFormat::kQ4_G, "q4_g", 4, 0, true, 64, true},
    {WeightFormat::kQ4_K, "q4_k", 4, 0, true, 32, true},
    {WeightFormat::kQ8_G, "q8_g", 8, 128, false, 64, true},
    {WeightFormat::kQ5_K, "q5_k", 8, 0, true, 32, true},
    {WeightFormat::kQ6_K, "q6_k", 8, 128, false, 16, true},
    {WeightFormat::kF8_G, "f8_g", 8, 0, false, 64, true},
    {WeightFormat::kF8_A8, "f8_a8", 8, 0, false, 64, true},
}};

constexpr const PackedLayout& packed_layout(WeightFormat format) {
  return kPackedLayouts[static_cast<std::size_t>(format) - 1];
}

// Null: no such format.
constexpr const PackedLayout* find_packed_layout(std::string_view name) {
  for (const PackedLayout& one : kPackedLayouts) {
    if (name == one.name) return &one;
  }
  return nullptr;
}

}  // namespace specdec
