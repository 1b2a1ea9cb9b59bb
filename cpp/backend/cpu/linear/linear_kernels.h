// The inner kernels of PackedLinear, one table per instruction set.
//
// Packed weights: panels of 32 columns, a panel is `steps` steps, a step is 32 columns of one k
// (fp32, fp16) or of two successive k interleaved per column (bf16): 128, 64 or 128 bytes. Steps of
// x are 4 bytes for every type: one float, or two bf16. So one signature serves all.
//
// Weights in f8_g are a step of 64 codes of e4m3, two successive k of 32 columns. Every value is a
// bf16 number, so they are widened to bf16 and go through the same products: in registers where an
// instruction set has tiles for it, else 64 k of a panel at a time, which all rows then share. Both
// give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cpu/linear/weight_type.h"
#include "base/cpu_features.h"

namespace specdec::cpu {

// y[rows, 32] = (resume ? y + : ) x[rows, steps] * panel, one chain each, times scale[32] if given
// (rounded before it is added), then + bias[32] if given.
// Rows of x are x_row_bytes apart, rows of y y_stride floats. `prefetch` is fetched in the rhythm
// in which the panel is read; it may point past the end of anything.
// A chain may be computed in several calls (LinearKernels::cut_steps): what it has summed up lies
// in carry[rows, 32] meanwhile, and y is written by the last one alone.
struct TileArgs {
  const std::byte* panel;
  const std::byte* x;
  std::int64_t x_row_bytes;
  std::int64_t steps;
  float* y;
  std::int64_t y_stride;
  const float* scale;
  const float* bias;
  const std::byte* prefetch;
  bool resume;
  float* carry;
  bool carried_in, carries_on;
  // Rows that the tile registers are set up for, 0: none; kept from one call to the next.
  int* configured_rows;
};
using TileFn = void (*)(const TileArgs&);

// Where a step of f8_g has the first of a column's two codes. Unpacking the lower and the upper
// halves of 16-byte lanes gives columns in order: 0 to 15, and 16 to 31.
constexpr int scaled_place(int column) {
  return 16 * (column % 16 / 4) + 8 * (column / 16) + 2 * (column % 4);
}

// Codes of kScaledGroup k of a panel, in steps.
inline constexpr int kScaledCodes = 2048;
// out[kScaledCodes] = codes in steps of bf16. No code is a NaN; `codes` and `out` are aligned to 64
// bytes; `prefetch` is fetched in the rhythm in which codes are read.
using WidenFn = void (*)(const std::byte* codes, std::uint16_t* out, const std::byte* prefetch);

// 32 k of a panel in bf16: steps, and elements.
inline constexpr int kWideGroupSteps = 16, kWideGroup = 1024;
// out[groups * kWideGroup] = successive groups of a panel of quantised weights in steps of bf16,
// each element rounded. `step` and `out` are aligned to 64 bytes; `prefetch` as above.
using WidenGroupsFn = void (*)(const std::byte* step, std::int64_t groups, std::uint16_t* out,
                               const std::byte* prefetch);

inline constexpr int kMaxTileRows = 32;

// How far ahead of the reads a lone row tile fetches. Farther than a page disturbs the processor's
// own prefetching, and costs where a thread does little but read: for one row.
inline constexpr std::int64_t kPrefetchBytes = 6144, kOneRowPrefetchBytes = 4096;
// Rows whose chains are in hand at a time where they are cut: more of them share what is widened.
inline constexpr int kCarriedRows = 256;
inline constexpr int kMostCutSteps = 96;

// Links of one chain; the sums of successive chains are added up in order.
inline constexpr int kChainSteps = 128;

struct LinearKernels {
  // Tallest tile that still fits the registers, and that of bf16 weights; tile functions exist for
  // 1 row to so many.
  int max_rows, bf16_rows;
  // Links of a chain of bf16, in steps. Short chains keep the rounding error small, and a panel's
  // stretch of this length in the first-level cache while several row tiles use it.
  int bf16_chain = kChainSteps;
  TileFn f32[kMaxTileRows + 1];
  TileFn f16[kMaxTileRows + 1];
  TileFn bf16[kMaxTileRows + 1];
  // f8_g: tiles of whole groups of a panel as they are packed, or what widens a group for the tiles
  // of bf16; with tile registers one row has the first and more rows the second. What there is not
  // is null.
  TileFn e4m3[kMaxTileRows + 1];
  WidenFn widen;
  // What widens quantised weights for the tiles of bf16; null where these are no faster than
  // products of 8 bits, however many rows there are (PackedLinear::fast_form).
  WidenGroupsFn (*widen_groups)(WeightType type) = nullptr;
  // How far ahead of its reads a lone tile of bf16 rows fetches.
  std::int64_t bf16_ahead = kPrefetchBytes;
  // bf16 rows of several tiles take so many steps of a panel at a time, and so do all rows where
  // groups are widened, at most kMostCutSteps: they and a tile's x of these k fit the first-level
  // cache beside the sums of half of kCarriedRows. 0: whole chains.
  int cut_steps = 0;
  // Ends a series of calls that set up tile registers; null where there are none.
  void (*leave)() = nullptr;
};

const LinearKernels& linear_kernels(CpuIsa isa);

const LinearKernels& linear_kernels_plain();
const LinearKernels& linear_kernels_avx2();
const LinearKernels& linear_kernels_avx512();
const LinearKernels& linear_kernels_avx512_bf16();
const LinearKernels& linear_kernels_amx();

WidenGroupsFn widen_groups_avx512(WeightType type);

}  // namespace specdec::cpu
