// The tile kernel as a template over the vector operations of one instruction set.
//
// Included by the per-ISA files only. Every Op lives in an anonymous namespace there, so that the
// linker can never pick the code of one instruction set for another.
//
// An Op is one instruction set and one weight type:
//   Vec, kLanes                     float accumulators
//   kStepBytes                      bytes of a step of 32 columns
//   Weights load(const std::byte*)  the weights of kLanes columns of a step, or
//   void load_step(const std::byte*, Weights*)  those of all columns
//   Input broadcast(const std::byte*)  one step (4 bytes) of a row of x
//   Vec mac(Vec, Weights, Input)    the link of the chain
//   Vec zero(), load_y, store_y, add, mul, prefetch
#pragma once

#include <cstdint>

#include "backend/cpu/linear/fetch_rows.h"
#include "backend/cpu/linear/linear_kernels.h"

namespace specdec::cpu {

// The end of a chain of row m, columns `column` and following.
template <typename Op>
inline __attribute__((always_inline)) void store_sum(const TileArgs& args, int m, int column,
                                                     typename Op::Vec sum) {
  float* out = args.y + m * args.y_stride + column;
  if (args.scale != nullptr) sum = Op::mul(sum, Op::load_y(args.scale + column));
  if (args.resume) sum = Op::add(Op::load_y(out), sum);
  if (args.bias != nullptr) sum = Op::add(sum, Op::load_y(args.bias + column));
  Op::store_y(out, sum);
}

// kRows rows by kVecs vectors of columns starting at column `column`: all accumulators in
// registers.
template <typename Op, int kRows, int kVecs, bool kPrefetch>
inline __attribute__((always_inline)) void tile_block(const TileArgs& args, int column) {
  using Vec = typename Op::Vec;
  constexpr int kVecBytes = Op::kStepBytes / 32 * Op::kLanes;
  Vec acc[kRows][kVecs];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      acc[m][v] = Op::zero();
    }
  }
  const std::byte* w = args.panel + column * (Op::kStepBytes / 32);
  const std::byte* w_end = w + args.steps * Op::kStepBytes;
  const std::int64_t ahead = args.prefetch - args.panel;
  // Three base pointers and one stride address twelve rows: they fit the general registers.
  const std::int64_t stride = args.x_row_bytes;
  const std::byte* x0 = args.x;
  const std::byte* x1 = x0 + (kRows > 4 ? 4 * stride : 0);
  const std::byte* x2 = x0 + (kRows > 8 ? 8 * stride : 0);
  for (; w != w_end; w += Op::kStepBytes) {
    if constexpr (kPrefetch) {
      Op::prefetch(w + ahead);
      if constexpr (Op::kStepBytes > 64) Op::prefetch(w + ahead + 64);
    }
    typename Op::Weights weights[kVecs];
    if constexpr (requires { Op::load_step(w, weights); }) {
      static_assert(kVecs * Op::kLanes == 32);
      Op::load_step(w, weights);
    } else {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) weights[v] = Op::load(w + v * kVecBytes);
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const std::byte* x = m < 4 ? x0 : (m < 8 ? x1 : x2);
      const typename Op::Input input = Op::broadcast(x + (m % 4) * stride);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) acc[m][v] = Op::mac(acc[m][v], weights[v], input);
    }
    x0 += 4;
    x1 += 4;
    x2 += 4;
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      store_sum<Op>(args, m, column + v * Op::kLanes, acc[m][v]);
    }
  }
}

// A whole panel; in several blocks where the registers do not hold kRows x 32 columns.
template <typename Op, int kRows>
void tile(const TileArgs& args) {
  constexpr int kVecsOfPanel = 32 / Op::kLanes;
  constexpr int kFit = Op::kAccumulators / kRows;
  constexpr int kVecs = kFit >= kVecsOfPanel ? kVecsOfPanel : (kFit >= 2 ? 2 : 1);
  static_assert(kFit >= 1 && kVecsOfPanel % kVecs == 0);
  fetch_to_write(args.y, args.y_stride, kRows);
  tile_block<Op, kRows, kVecs, true>(args, 0);
  if constexpr (kVecs < kVecsOfPanel) {
    for (int column = kVecs * Op::kLanes; column < 32; column += kVecs * Op::kLanes) {
      tile_block<Op, kRows, kVecs, false>(args, column);
    }
  }
}

// Calls run(args) for each group of a panel in f8_g, scales and codes as they are packed.
template <typename Op, typename Run>
inline __attribute__((always_inline)) void for_each_group(const TileArgs& args, Run run) {
  constexpr std::int64_t kSteps = kScaledGroup / 2, kGroupBytes = scaled_group_bytes();
  TileArgs group = args;
  group.steps = kSteps;
  for (std::int64_t step = 0; step < args.steps; step += kSteps) {
    const std::byte* begin = args.panel + step / kSteps * kGroupBytes;
    group.scale = reinterpret_cast<const float*>(begin);
    group.panel = begin + 32 * sizeof(float);
    group.prefetch = args.prefetch + (group.panel - args.panel);
    // The steps fetch codes; in front of them the scales.
    Op::prefetch(group.prefetch - 128);
    Op::prefetch(group.prefetch - 64);
    group.x = args.x + 4 * step;
    group.bias = step + kSteps == args.steps ? args.bias : nullptr;
    group.resume = args.resume || step != 0;
    run(group);
  }
}

template <typename Op, int kRows>
void scaled_tile(const TileArgs& args) {
  fetch_to_write(args.y, args.y_stride, kRows);
  for_each_group<Op>(
      args, [](const TileArgs& group) { tile_block<Op, kRows, 32 / Op::kLanes, true>(group, 0); });
}

template <typename Op, int kRows>
constexpr void fill_tiles(TileFn* table) {
  if constexpr (kRows >= 1) {
    constexpr bool kScaled = requires { Op::load_step(nullptr, nullptr); };
    if constexpr (kScaled) {
      table[kRows] = &scaled_tile<Op, kRows>;
    } else {
      table[kRows] = &tile<Op, kRows>;
    }
    fill_tiles<Op, kRows - 1>(table);
  }
}

template <typename F32, typename F16, typename BF16, int kRows>
constexpr LinearKernels make_linear_kernels(WidenFn widen) {
  LinearKernels kernels{};
  kernels.widen = widen;
  kernels.max_rows = kernels.bf16_rows = kRows;
  fill_tiles<F32, kRows>(kernels.f32);
  fill_tiles<F16, kRows>(kernels.f16);
  fill_tiles<BF16, kRows>(kernels.bf16);
  return kernels;
}

}  // namespace specdec::cpu
