// The inner kernels of PackedLinear, one table per instruction set.
//
// Packed weights: panels of 32 columns, a panel is `steps` steps, a step is 32 columns of one k
// (fp32, fp16) or of two successive k interleaved per column (bf16): 128, 64 or 128 bytes. Steps of
// x are 4 bytes for every type: one float, or two bf16. So one signature serves all.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cpu/cpu_features.h"

namespace specdec::cpu {

// y[rows, 32] = (resume ? y + : ) x[rows, steps] * panel, one chain each, then + bias[32] if given.
// Rows of x are x_row_bytes apart, rows of y y_stride floats. `prefetch` is fetched in the rhythm
// in which the panel is read; it may point past the end of anything.
struct TileArgs {
  const std::byte* panel;
  const std::byte* x;
  std::int64_t x_row_bytes;
  std::int64_t steps;
  float* y;
  std::int64_t y_stride;
  const float* bias;
  const std::byte* prefetch;
  bool resume;
};
using TileFn = void (*)(const TileArgs&);

inline constexpr int kMaxTileRows = 12;

struct LinearKernels {
  // Tallest tile that still fits the registers; tile functions exist for 1..max_rows rows.
  int max_rows;
  TileFn f32[kMaxTileRows + 1];
  TileFn f16[kMaxTileRows + 1];
  TileFn bf16[kMaxTileRows + 1];
};

const LinearKernels& linear_kernels(CpuIsa isa);

const LinearKernels& linear_kernels_plain();
const LinearKernels& linear_kernels_avx2();
const LinearKernels& linear_kernels_avx512();
const LinearKernels& linear_kernels_avx512_bf16();

}  // namespace specdec::cpu
