// The tile kernel of quantised weights as a template over the operations of one instruction set.
//
// Included by the per-ISA files only; every Op lives in an anonymous namespace there. An Op has
//   Ints, Floats, kLanes            vectors of 32-bit lanes; a lane is a column
//   kVecs                           vectors of columns at a time: 8 kVecs registers hold weights
//   kBlockRows                      rows at a time
//   load_codes(p), low(v), high(v)  codes of a quad of k; the nibbles of it
//   Ints dot(Ints sum, Ints codes, Ints x)    sum + four products per lane
//   Ints splat(p), zero_ints(), zero_floats(), shift_left<n>(v), sub(a, b); Floats to_floats(Ints)
//   Floats load(p), load_half(p), splat_float(p), mul, add; store(p, v); prefetch(p)
#pragma once

#include <algorithm>

#include "backend/cpu/linear/quant_kernels.h"

namespace specdec::cpu {

inline constexpr int kPanelWidth = 32;  // columns of a panel

// The weights of a step, of kVecs vectors of columns: in registers.
template <typename Op, WeightType kType>
struct StepWeights {
  static constexpr QuantFormat kFormat = quant_format(kType);
  static constexpr int kVecs = Op::kVecs;
  typename Op::Ints codes[8][kVecs];
  typename Op::Floats scale[kVecs], late_scale[kVecs], min[kVecs];

  __attribute__((always_inline)) void load(const std::byte* step, int column) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      const int at = column + v * Op::kLanes;
#pragma GCC unroll 8
      for (int j = 0; j < (kFormat.nibbles ? 4 : 8); ++j) {
        const typename Op::Ints packed = Op::load_codes(step + j * 128 + at * 4);
        codes[j][v] = kFormat.nibbles ? Op::low(packed) : packed;
        if constexpr (kFormat.nibbles) codes[j + 4][v] = Op::high(packed);
      }
      scale[v] = load_scale(step, 0, at);
      if constexpr (kFormat.two_scales) late_scale[v] = load_scale(step, 1, at);
      if constexpr (kFormat.has_min) min[v] = load_scale(step, kFormat.two_scales ? 2 : 1, at);
    }
  }
  __attribute__((always_inline)) static typename Op::Floats load_scale(const std::byte* step,
                                                                       int set, int column) {
    const std::byte* scales = step + kFormat.codes_bytes();
    const int index = set * 32 + column;
    if constexpr (kFormat.wide_scales) {
      return Op::load(reinterpret_cast<const float*>(scales) + index);
    } else {
      return Op::load_half(scales + 2 * index);
    }
  }
};

// Adds one step to kRows rows. Rows of a block are independent chains: three rows of two vectors
// keep two dot products per cycle busy, and their sums fit the registers beside the weights.
template <typename Op, WeightType kType, int kRows>
inline __attribute__((always_inline)) void add_step(const StepWeights<Op, kType>& w,
                                                    const std::byte* x_bytes,
                                                    std::int64_t x_row_bytes,
                                                    typename Op::Floats (&y)[kRows][Op::kVecs]) {
  using Ints = typename Op::Ints;
  using Floats = typename Op::Floats;
  constexpr QuantFormat kFormat = quant_format(kType);
  constexpr bool kHasZero = kFormat.zero_shift >= 0;
  constexpr int kVecs = Op::kVecs;
  Ints sum[kRows][kVecs], late[kRows][kVecs];
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
    const auto& x = *reinterpret_cast<const QuantBlock*>(x_bytes + m * x_row_bytes);
    Ints start = Op::zero_ints(), late_start = Op::zero_ints();
    if constexpr (kHasZero) {
      Ints minus_sum = Op::splat(&x.minus_sum);
      if constexpr (kFormat.two_scales) {
        const std::int32_t minus_low_sum = x.minus_low_sum;
        const Ints low = Op::splat(&minus_low_sum);
        late_start = Op::template shift_left<kFormat.zero_shift>(Op::sub(minus_sum, low));
        minus_sum = low;
      }
      start = Op::template shift_left<kFormat.zero_shift>(minus_sum);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      sum[m][v] = start;
      late[m][v] = late_start;
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
      const Ints quad = Op::splat(x_bytes + m * x_row_bytes + 4 * j);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        Ints& into = kFormat.two_scales && j >= 4 ? late[m][v] : sum[m][v];
        into = Op::dot(into, w.codes[j][v], quad);
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
    const auto& x = *reinterpret_cast<const QuantBlock*>(x_bytes + m * x_row_bytes);
    const Floats x_scale = Op::splat_float(&x.scale);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      Floats value = y[m][v];
      value = Op::add(value, Op::mul(Op::to_floats(sum[m][v]), Op::mul(w.scale[v], x_scale)));
      if constexpr (kFormat.two_scales) {
        value =
            Op::add(value, Op::mul(Op::to_floats(late[m][v]), Op::mul(w.late_scale[v], x_scale)));
      }
      if constexpr (kFormat.has_min) {
        value = Op::add(value, Op::mul(w.min[v], Op::splat_float(&x.scaled_sum)));
      }
      y[m][v] = value;
    }
  }
}

// The same for rows of `y` in memory, kPanelWidth apart: it is near, and so any number of rows
// shares one unpacking of the weights.
template <typename Op, WeightType kType, int kRows>
inline __attribute__((always_inline)) void add_block(const StepWeights<Op, kType>& w,
                                                     const std::byte* x, std::int64_t x_row_bytes,
                                                     float* y) {
  typename Op::Floats values[kRows][Op::kVecs];
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < Op::kVecs; ++v)
      values[m][v] = Op::load(y + m * kPanelWidth + v * Op::kLanes);
  }
  add_step<Op, kType, kRows>(w, x, x_row_bytes, values);
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < Op::kVecs; ++v)
      Op::store(y + m * kPanelWidth + v * Op::kLanes, values[m][v]);
  }
}

// Blocks of kRows first, what is left in smaller ones.
template <typename Op, WeightType kType, int kRows>
inline __attribute__((always_inline)) void add_rows(const StepWeights<Op, kType>& w,
                                                    const std::byte* x, std::int64_t x_row_bytes,
                                                    int rows, float* y) {
  for (; rows >= kRows; rows -= kRows, x += kRows * x_row_bytes, y += kRows * kPanelWidth) {
    add_block<Op, kType, kRows>(w, x, x_row_bytes, y);
  }
  if constexpr (kRows > 1) add_rows<Op, kType, kRows - 1>(w, x, x_row_bytes, rows, y);
}

inline __attribute__((always_inline)) bool has_rest(const std::byte* x) {
  return reinterpret_cast<const QuantBlock*>(x)->has_rest != 0;
}

inline constexpr auto kQuantBlockPair = static_cast<std::int64_t>(2 * sizeof(QuantBlock));

// One row, whose sums stay in registers.
template <typename Op, WeightType kType>
void one_row_tile(const QuantTileArgs& args) {
  static_assert(Op::kVecs * Op::kLanes == kPanelWidth);
  constexpr std::int64_t kStepBytes = quant_format(kType).step_bytes();
  const std::int64_t ahead = args.prefetch - args.panel;
  typename Op::Floats sums[1][Op::kVecs];
#pragma GCC unroll 8
  for (int v = 0; v < Op::kVecs; ++v) sums[0][v] = Op::zero_floats();
  const std::byte* step = args.panel;
  const std::byte* x = args.x;
  for (std::int64_t i = 0; i < args.steps; ++i, step += kStepBytes, x += kQuantBlockPair) {
#pragma GCC unroll 24
    for (std::int64_t line = 0; line < kStepBytes; line += 64) Op::prefetch(step + ahead + line);
    StepWeights<Op, kType> weights;
    weights.load(step, 0);
    add_step<Op, kType, 1>(weights, x, 0, sums);
    if (has_rest(x)) add_step<Op, kType, 1>(weights, x + sizeof(QuantBlock), 0, sums);
  }
#pragma GCC unroll 8
  for (int v = 0; v < Op::kVecs; ++v) {
    typename Op::Floats sum = sums[0][v];
    if (args.bias != nullptr) sum = Op::add(sum, Op::load(args.bias + v * Op::kLanes));
    Op::store(args.y + v * Op::kLanes, sum);
  }
}

template <typename Op, WeightType kType>
void quant_tile(const QuantTileArgs& args) {
  if constexpr (Op::kVecs * Op::kLanes == kPanelWidth) {
    if (args.rows == 1) return one_row_tile<Op, kType>(args);
  }
  constexpr int kBlockRows = quant_format(kType).two_scales ? 2 : Op::kBlockRows;
  constexpr std::int64_t kStepBytes = quant_format(kType).step_bytes();
  // Rows of args.y are often a multiple of 4 KiB apart and would share a few sets of the cache.
  alignas(64) float sums[kQuantTileRows * kPanelWidth];
  std::fill_n(sums, args.rows * kPanelWidth, 0.0f);
  const std::int64_t ahead = args.prefetch - args.panel;
  const std::byte* step = args.panel;
  for (std::int64_t i = 0; i < args.steps; ++i, step += kStepBytes) {
#pragma GCC unroll 24
    for (std::int64_t line = 0; line < kStepBytes; line += 64) Op::prefetch(step + ahead + line);
#pragma GCC unroll 4
    for (int column = 0; column < kPanelWidth; column += Op::kVecs * Op::kLanes) {
      StepWeights<Op, kType> weights;
      weights.load(step, column);
      const std::byte* x = args.x + i * kQuantBlockPair;
      add_rows<Op, kType, kBlockRows>(weights, x, args.x_row_bytes, args.rows, sums + column);
      for (int m = 0; m < args.rows; ++m, x += args.x_row_bytes) {
        if (!has_rest(x)) continue;
        add_block<Op, kType, 1>(weights, x + sizeof(QuantBlock), 0,
                                sums + column + m * kPanelWidth);
      }
    }
  }
  for (int m = 0; m < args.rows; ++m) {
    float* y = args.y + m * args.y_stride;
    const float* sum = sums + m * kPanelWidth;
    for (int c = 0; c < kPanelWidth; ++c) {
      y[c] = args.bias != nullptr ? sum[c] + args.bias[c] : sum[c];
    }
  }
}

template <typename Op>
constexpr QuantKernels make_quant_kernels() {
  return {&quant_tile<Op, WeightType::kQ8_0>, &quant_tile<Op, WeightType::kQ4_0>,
          &quant_tile<Op, WeightType::kQ4_1>, &quant_tile<Op, WeightType::kQ4K>,
          &quant_tile<Op, WeightType::kQ5K>,  &quant_tile<Op, WeightType::kQ6K>,
          &quant_tile<Op, WeightType::kQ8G>};
}

}  // namespace specdec::cpu
