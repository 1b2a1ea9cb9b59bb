// The tile kernel of quantised weights as a template over the operations of one instruction set.
//
// Included by the per-ISA files only; every Op lives in an anonymous namespace there. An Op has
//   Ints, Floats, kLanes            vectors of 32-bit lanes; a lane is a column
//   kVecs                           vectors of columns at a time: 8 kVecs registers hold weights
//   kSignedCodes                    dot<true>() takes u - 128 for u: it needs no zero
//   load_codes(p), low(v), high(v)  codes of a quad of k; the nibbles of it
//   Ints dot<kAllBits>(Ints sum, Ints codes, Ints x)  sum + four products per lane; kAllBits: codes
//                                   take all 8 bits, else at most 6
//   Ints splat(p), zero_ints(), shift_left<n>(v), sub(a, b); Floats to_floats(Ints)
//   Floats load(p), load_half(p), splat_float(p), mul, add; store(p, v); prefetch(p)
#pragma once

#include "backend/cpu/linear/quant_kernels.h"

namespace specdec::cpu {

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

// Adds one step to kRows rows. y is read and written: it is near, and so any number of rows shares
// one unpacking of the weights. Two rows at a time have twice the independent chains of one.
template <typename Op, WeightType kType, int kRows>
inline __attribute__((always_inline)) void add_step(const StepWeights<Op, kType>& w,
                                                    const std::byte* x_bytes,
                                                    std::int64_t x_row_bytes, float* y,
                                                    std::int64_t y_stride) {
  using Ints = typename Op::Ints;
  using Floats = typename Op::Floats;
  constexpr QuantFormat kFormat = quant_format(kType);
  constexpr bool kAllBits = kType == WeightType::kQ8_0;
  constexpr bool kHasZero = kFormat.zero_shift >= 0 && !(Op::kSignedCodes && kAllBits);
  constexpr int kVecs = Op::kVecs;
  Ints sum[kRows][kVecs], late[kRows][kVecs];
#pragma GCC unroll 2
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
#pragma GCC unroll 2
    for (int m = 0; m < kRows; ++m) {
      const Ints quad = Op::splat(x_bytes + m * x_row_bytes + 4 * j);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        Ints& into = kFormat.two_scales && j >= 4 ? late[m][v] : sum[m][v];
        into = Op::template dot<kAllBits>(into, w.codes[j][v], quad);
      }
    }
  }
#pragma GCC unroll 2
  for (int m = 0; m < kRows; ++m) {
    const auto& x = *reinterpret_cast<const QuantBlock*>(x_bytes + m * x_row_bytes);
    const Floats x_scale = Op::splat_float(&x.scale);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      float* out = y + m * y_stride + v * Op::kLanes;
      Floats value = Op::load(out);
      value = Op::add(value, Op::mul(Op::to_floats(sum[m][v]), Op::mul(w.scale[v], x_scale)));
      if constexpr (kFormat.two_scales) {
        value =
            Op::add(value, Op::mul(Op::to_floats(late[m][v]), Op::mul(w.late_scale[v], x_scale)));
      }
      if constexpr (kFormat.has_min) {
        value = Op::add(value, Op::mul(w.min[v], Op::splat_float(&x.scaled_sum)));
      }
      Op::store(out, value);
    }
  }
}

// Adds what the step's second blocks hold, where rows have one.
template <typename Op, WeightType kType>
inline __attribute__((always_inline)) void add_rests(const StepWeights<Op, kType>& w,
                                                     const std::byte* x, std::int64_t x_row_bytes,
                                                     int rows, float* y, std::int64_t y_stride) {
  for (int m = 0; m < rows; ++m, x += x_row_bytes, y += y_stride) {
    if (reinterpret_cast<const QuantBlock*>(x)->has_rest == 0) continue;
    add_step<Op, kType, 1>(w, x + sizeof(QuantBlock), 0, y, 0);
  }
}

template <typename Op, WeightType kType>
void quant_tile(const QuantTileArgs& args) {
  constexpr std::int64_t kStepBytes = quant_format(kType).step_bytes();
  for (int m = 0; m < args.rows; ++m) {
    for (int c = 0; c < 32; ++c) args.y[m * args.y_stride + c] = 0.0f;
  }
  const std::int64_t ahead = args.prefetch - args.panel;
  constexpr auto kBlockBytes = static_cast<std::int64_t>(2 * sizeof(QuantBlock));
  const std::byte* step = args.panel;
  for (std::int64_t i = 0; i < args.steps; ++i, step += kStepBytes) {
#pragma GCC unroll 24
    for (std::int64_t line = 0; line < kStepBytes; line += 64) Op::prefetch(step + ahead + line);
#pragma GCC unroll 4
    for (int column = 0; column < 32; column += Op::kVecs * Op::kLanes) {
      StepWeights<Op, kType> weights;
      weights.load(step, column);
      const std::byte* x = args.x + i * kBlockBytes;
      float* y = args.y + column;
      int m = 0;
      for (; m + 2 <= args.rows; m += 2, x += 2 * args.x_row_bytes, y += 2 * args.y_stride) {
        add_step<Op, kType, 2>(weights, x, args.x_row_bytes, y, args.y_stride);
      }
      if (m < args.rows) add_step<Op, kType, 1>(weights, x, 0, y, 0);
      add_rests(weights, args.x + i * kBlockBytes, args.x_row_bytes, args.rows, args.y + column,
                args.y_stride);
    }
  }
  if (args.bias == nullptr) return;
  for (int m = 0; m < args.rows; ++m) {
    for (int c = 0; c < 32; ++c) args.y[m * args.y_stride + c] += args.bias[c];
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
