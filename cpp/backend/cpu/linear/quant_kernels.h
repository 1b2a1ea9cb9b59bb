// The inner kernels of quantised weights, one table per instruction set.
//
// Packed weights: panels of 32 columns, a panel is a sequence of steps, a step is 32 k of 32
// columns in the layout of QuantFormat:
//   codes   8 bits: for each 4 successive k, 4 bytes per column. 4 bits: the same for the first 16
//           k in the low nibbles and the last 16 in the high ones.
//   scales  [1 or 2][32], then minima [32], float16 or float32
//
// y[m, n] = sum over steps, in ascending order, of
//   float(sum_k (u - zero) * q) * (scale * x.scale)   (two such terms where there are two scales)
//   + min * x.scaled_sum                              (where there is a minimum)
//   + the same terms of the step's second block of x  (where x.has_rest)
// then + bias[n]. The inner sum is of whole numbers and exact, scale * x.scale is rounded to
// float32, and each term is added by one fused multiply-add. So every instruction set gives the
// same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cpu/linear/quant_row.h"
#include "backend/cpu/linear/weight_type.h"
#include "base/cpu_features.h"

namespace specdec::cpu {

// y[rows, 32] = x[rows, steps] * panel + bias[32] if given; x rows are x_row_bytes apart. While the
// panel is read, `prefetch` is fetched in the same rhythm; it may point past the end of anything.
struct QuantTileArgs {
  const std::byte* panel;
  const std::byte* x;
  std::int64_t x_row_bytes;
  std::int64_t steps;
  int rows;
  float* y;
  std::int64_t y_stride;
  const float* bias;
  const std::byte* prefetch;
  int pass_rows = 0;  // that pass over the panel together, at most; 0: as the kernel likes
};
using QuantTileFn = void (*)(const QuantTileArgs&);

// Rows of a tile at most: they share one reading of a panel, and their x and y stay in the caches
// nearest to the core.
inline constexpr int kQuantTileRows = 32;

struct QuantKernels {
  QuantTileFn q8_0, q4_0, q4_1, q4_k, q5_k, q6_k, q8_g;
  // Rows of a tile where there are more than kQuantTileRows. 15 rows of 576 columns are 26 KB and
  // stay in the first-level cache; more of them share what is unpacked for a tile.
  int prefill_rows = 15;
  // QuantTileArgs::pass_rows of such tiles, whose panels are near.
  int prefill_pass_rows = 0;

  QuantTileFn of(WeightType type) const {
    switch (type) {
      case WeightType::kQ4_0:
        return q4_0;
      case WeightType::kQ4_1:
        return q4_1;
      case WeightType::kQ4K:
      case WeightType::kQ4G:  // the same layout
        return q4_k;
      case WeightType::kQ8G:
        return q8_g;
      case WeightType::kQ5K:
      case WeightType::kQ5_1:
        return q5_k;
      case WeightType::kQ6K:
        return q6_k;
      default:
        return q8_0;
    }
  }
};

// The best table of this machine that `isa` allows.
const QuantKernels& quant_kernels(CpuIsa isa);

const QuantKernels& quant_kernels_plain();
const QuantKernels& quant_kernels_avx2();
const QuantKernels& quant_kernels_avx_vnni();
const QuantKernels& quant_kernels_avx512_vnni();

}  // namespace specdec::cpu
