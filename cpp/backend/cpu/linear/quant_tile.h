// The tile kernel of quantised weights as a template over the operations of one instruction set.
//
// Included by the per-ISA files only; every Op lives in an anonymous namespace there. An Op has
//   Ints, Floats, kLanes            vectors of 32-bit lanes; a lane is a column
//   kVecs, kBlockRows               vectors of columns, and rows, of a block
//   kRegisterRows                   so many rows of y fit the registers beside a block's sums
//   codes = load_codes(p)           codes of a quad of k; low(v), high(v): the nibbles of it
//   add_dot(sum, codes, x)          adds four products per lane, in place
//   Ints splat(p), zero_ints(), shift_left<n>(v), sub(a, b); Floats to_floats(Ints)
//   Floats load(p), load_half(p), splat_float(p), zero_floats(), mul, add, fma(a, b, c) = a * b + c
//   store(p, v), prefetch(p)
#pragma once

#include <algorithm>

#include "backend/cpu/linear/fetch_rows.h"
#include "backend/cpu/linear/quant_kernels.h"

namespace specdec::cpu {

inline constexpr int kPanelWidth = 32;  // columns of a panel

inline constexpr auto kQuantBlockPair = static_cast<std::int64_t>(2 * sizeof(QuantBlock));

// A row's sums of all columns of a panel.
template <typename Op>
struct PanelRow {
  static constexpr int kCount = kPanelWidth / Op::kLanes;
  typename Op::Floats vecs[kCount];
};

inline const QuantBlock& block_at(const std::byte* x) {
  return *reinterpret_cast<const QuantBlock*>(x);
}

// Codes of quad j of a step; one vector of columns, which begins at `column`.
template <typename Op, WeightType kType>
inline __attribute__((always_inline)) typename Op::Ints codes_at(const std::byte* step, int j,
                                                                 int column) {
  if constexpr (quant_format(kType).nibbles) {
    const typename Op::Ints packed = Op::load_codes(step + j % 4 * 128 + column * 4);
    return j < 4 ? Op::low(packed) : Op::high(packed);
  } else {
    return Op::load_codes(step + j * 128 + column * 4);
  }
}

// Scale or minimum number `set`, of the same columns.
template <typename Op, WeightType kType>
inline __attribute__((always_inline)) typename Op::Floats scale_at(const std::byte* step, int set,
                                                                   int column) {
  constexpr QuantFormat kFormat = quant_format(kType);
  const std::byte* scales = step + kFormat.codes_bytes();
  const int index = set * kPanelWidth + column;
  if constexpr (kFormat.wide_scales) {
    return Op::load(reinterpret_cast<const float*>(scales) + index);
  } else {
    return Op::load_half(scales + 2 * index);
  }
}

// What the sum of a row's products begins with, so that it counts u - zero: of all 32 elements, or
// of half `half` of them.
template <typename Op, WeightType kType>
inline __attribute__((always_inline)) typename Op::Ints start_of(const QuantBlock& x, int half) {
  constexpr QuantFormat kFormat = quant_format(kType);
  if constexpr (kFormat.zero_shift < 0) return Op::zero_ints();
  typename Op::Ints minus_sum = Op::splat(&x.minus_sum);
  if constexpr (kFormat.two_scales) {
    const std::int32_t minus_low_sum = x.minus_low_sum;
    const typename Op::Ints low = Op::splat(&minus_low_sum);
    minus_sum = half == 0 ? low : Op::sub(minus_sum, low);
  }
  return Op::template shift_left<kFormat.zero_shift>(minus_sum);
}

// What a block adds a step to: rows of x at equal distances, rows of y behind each other...
template <typename Op>
struct EvenRows {
  const std::byte* first;
  std::int64_t row_bytes;
  PanelRow<Op>* y;
  __attribute__((always_inline)) const std::byte* x(int m) const { return first + m * row_bytes; }
  __attribute__((always_inline)) PanelRow<Op>& y_of(int m) const { return y[m]; }
};

// ...or any rows.
template <typename Op>
struct ListedRows {
  const std::byte* const* first;
  PanelRow<Op>* const* y;
  __attribute__((always_inline)) const std::byte* x(int m) const { return first[m]; }
  __attribute__((always_inline)) PanelRow<Op>& y_of(int m) const { return *y[m]; }
};

// Adds kVecs vectors of columns of one step to kRows rows of y. Quad by quad, the sums of all rows
// are as many independent chains, one behind the other in the program: a dot product waits four or
// five cycles for the one before it in its chain.
//
// With kFetches, its share of a step's lines is fetched from `fetch` on, one or two lines between
// quads. All at once they would wait for each other: a core has few slots for lines in flight.
template <typename Op, WeightType kType, int kRows, bool kFetches, typename Rows>
inline __attribute__((always_inline)) void add_block(const std::byte* step, int column,
                                                     const Rows& rows, const std::byte* fetch) {
  using Ints = typename Op::Ints;
  using Floats = typename Op::Floats;
  constexpr QuantFormat kFormat = quant_format(kType);
  constexpr int kVecs = Op::kVecs;
  constexpr int kHalves = kFormat.two_scales ? 2 : 1;
  constexpr int kQuads = 8 / kHalves;
  constexpr int kColumns = kVecs * Op::kLanes;
  // Lines of a step, fetched in so many turns.
  constexpr int kLines = static_cast<int>((kFormat.step_bytes() + 63) / 64);
  constexpr int kTurns = 8 * (kPanelWidth / kColumns);
  const int vec = column / Op::kLanes;
#pragma GCC unroll 2
  for (int half = 0; half < kHalves; ++half) {
    const bool adds_min = kFormat.has_min && half + 1 == kHalves;
    Ints sum[kRows][kVecs];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Ints start = start_of<Op, kType>(block_at(rows.x(m)), half);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sum[m][v] = start;
    }
#pragma GCC unroll 8
    for (int j = 0; j < kQuads; ++j) {
      const int at = half * kQuads + j;
#pragma GCC unroll 4
      for (int i = 0; kFetches && i < (kLines + kTurns - 1) / kTurns; ++i) {
        const int line = column / kColumns * 8 + at + i * kTurns;
        if (line < kLines) Op::prefetch(fetch + line * 64);
      }
      Ints codes[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        codes[v] = codes_at<Op, kType>(step, at, column + v * Op::kLanes);
      }
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const Ints quad = Op::splat(rows.x(m) + 4 * at);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) Op::add_dot(sum[m][v], codes[v], quad);
      }
    }
    Floats scale[kVecs], min[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      scale[v] = scale_at<Op, kType>(step, half, column + v * Op::kLanes);
      if (adds_min) min[v] = scale_at<Op, kType>(step, kHalves, column + v * Op::kLanes);
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const QuantBlock& block = block_at(rows.x(m));
      const Floats x_scale = Op::splat_float(&block.scale);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        Floats value = rows.y_of(m).vecs[vec + v];
        const Floats factor = Op::mul(scale[v], x_scale);
        value = Op::fma(Op::to_floats(sum[m][v]), factor, value);
        if (adds_min) value = Op::fma(min[v], Op::splat_float(&block.scaled_sum), value);
        rows.y_of(m).vecs[vec + v] = value;
      }
    }
  }
}

template <typename Op, WeightType kType, int kRows, bool kFetches, typename Rows>
inline __attribute__((always_inline)) void add_step(const std::byte* step, const Rows& rows,
                                                    const std::byte* fetch) {
#pragma GCC unroll 4
  for (int column = 0; column < kPanelWidth; column += Op::kVecs * Op::kLanes) {
    add_block<Op, kType, kRows, kFetches>(step, column, rows, fetch);
  }
}

// The second block of a row, if it has one.
template <typename Op, WeightType kType>
inline __attribute__((always_inline)) void add_rest(const std::byte* step, const std::byte* x,
                                                    PanelRow<Op>* y) {
  if (block_at(x).has_rest == 0) return;
  const EvenRows<Op> rest = {x + sizeof(QuantBlock), 0, y};
  add_step<Op, kType, 1, false>(step, rest, nullptr);
}

// Second blocks of several rows, up to four at a time, which share the unpacking of the weights.
// Not inline: the same code for tiles of all heights.
template <typename Op, WeightType kType>
__attribute__((noinline)) void add_rests(const std::byte* step, ListedRows<Op> rows, int count) {
  for (; count >= 4; count -= 4, rows.first += 4, rows.y += 4) {
    add_step<Op, kType, 4, false>(step, rows, nullptr);
  }
  if (count == 3) add_step<Op, kType, 3, false>(step, rows, nullptr);
  if (count == 2) add_step<Op, kType, 2, false>(step, rows, nullptr);
  if (count == 1) add_step<Op, kType, 1, false>(step, rows, nullptr);
}

// kRows rows of a tile, from row `first` on, with a whole panel.
template <typename Op, WeightType kType, int kRows>
void panel_pass(const QuantTileArgs& args, std::int64_t first) {
  constexpr std::int64_t kStepBytes = quant_format(kType).step_bytes();
  float* out = args.y + first * args.y_stride;
  fetch_to_write(out, args.y_stride, kRows);
  // In registers where there are few. Rows of args.y would not do for memory: they are often a
  // multiple of 4 KiB apart and would share a few sets of the cache.
  PanelRow<Op> sums[kRows];
  PanelRow<Op>* y = sums;
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < PanelRow<Op>::kCount; ++v) y[m].vecs[v] = Op::zero_floats();
  }
  const std::int64_t ahead = args.prefetch - args.panel, x_row_bytes = args.x_row_bytes;
  const std::byte* step = args.panel;
  const std::byte* x = args.x + first * x_row_bytes;
  for (std::int64_t i = 0; i < args.steps; ++i, step += kStepBytes, x += kQuantBlockPair) {
    const std::byte* fetch = step + ahead;
    // One register: the compiler would keep the sums of `ahead` and each line's place instead.
    asm("" : "+r"(fetch));
    // Says that others may read y: the compiler would hold some of it in registers and spill sums.
    if constexpr (kRows > Op::kRegisterRows) asm("" : "+r"(y) : : "memory");
    const EvenRows<Op> rows = {x, x_row_bytes, y};
    add_step<Op, kType, kRows, true>(step, rows, fetch);
    // One branch for all rows: second blocks are mostly those of the same channels.
    int rests = 0;
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) rests |= block_at(rows.x(m)).has_rest;
    if (rests == 0) continue;
    if constexpr (kRows <= Op::kRegisterRows) {
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) add_rest<Op, kType>(step, rows.x(m), y + m);
    } else {
      const std::byte* rest_x[kRows];
      PanelRow<Op>* rest_y[kRows];
      int count = 0;
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        // Without branches, which nothing could foresee.
        rest_x[count] = rows.x(m) + sizeof(QuantBlock);
        rest_y[count] = y + m;
        count += block_at(rows.x(m)).has_rest;
      }
      add_rests<Op, kType>(step, {rest_x, rest_y}, count);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < PanelRow<Op>::kCount; ++v) {
      const int column = v * Op::kLanes;
      typename Op::Floats sum = y[m].vecs[v];
      if (args.bias != nullptr) sum = Op::add(sum, Op::load(args.bias + column));
      Op::store(out + m * args.y_stride + column, sum);
    }
  }
}

using PanelPassFn = void (*)(const QuantTileArgs& args, std::int64_t first);

template <typename Op, WeightType kType, int kRows>
constexpr void fill_passes(PanelPassFn* passes) {
  passes[kRows] = &panel_pass<Op, kType, kRows>;
  if constexpr (kRows > 1) fill_passes<Op, kType, kRows - 1>(passes);
}

template <typename Op, WeightType kType>
struct PanelPasses {
  PanelPassFn of[Op::kBlockRows + 1] = {};
  constexpr PanelPasses() { fill_passes<Op, kType, Op::kBlockRows>(of); }
};

// Rows of a tile in passes of about equal height.
template <typename Op, WeightType kType>
void quant_tile(const QuantTileArgs& args) {
  static constexpr PanelPasses<Op, kType> kPasses;
  const int most = args.pass_rows > 0 ? std::min(args.pass_rows, Op::kBlockRows) : Op::kBlockRows;
  const int passes = (args.rows + most - 1) / most;
  const int height = (args.rows + passes - 1) / passes;
  // The args stay as they are: a copy of what was just written part by part would be read as a
  // whole, and wait until all stores before it are done.
  for (int first = 0; first < args.rows; first += height) {
    kPasses.of[std::min(args.rows - first, height)](args, first);
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
