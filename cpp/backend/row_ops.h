// Parameter structs of what a decoder does with each row between its matrix products. A row's bits
// depend on that row alone. Conventions: ops.h.
#pragma once

#include <cstdint>

#include "backend/ops.h"
#include "base/types.h"

namespace specdec {

// out = norm(x) for each row; with `added` or `sums`, x += added first, which is stored.
//   norm(x) = x / sqrt(mean(x^2) + eps) * w, sums in float32
// Rounds where transformers does: with plus_one (Gemma), w = 1 + weight and the result is rounded
// once; without, the quotient is rounded to the dtype before it meets the weight. x + added is
// rounded before it is normalised. With added_weight (sandwich norms) `added` goes through such a
// norm of its own first, rounded.
struct RmsNormParams {
  void* x = nullptr;                   // [rows, columns]; written if something is added
  const void* added = nullptr;         // [rows, columns]; null: nothing
  LinearSums sums;                     // in place of `added` and its weight: a product in pieces
  const void* added_weight = nullptr;  // [columns]; null: `added` as it is
  const void* weight = nullptr;        // [columns]
  void* out = nullptr;                 // [rows, columns]; may be x if nothing is added
  std::int64_t x_row_stride = 0, added_row_stride = 0, out_row_stride = 0;  // elements
  std::int32_t rows = 0, columns = 0;
  DType dtype = DType::kF32;  // of all of them: f32, f16 or bf16
  float eps = 1e-6f;
  bool plus_one = false;
  ExecutionContext exec;
};

enum class GateActivation : std::uint8_t { kSilu, kGeluTanh };

// out[i] = activation(x[i]) * x[columns + i] for each row. The activation is float32 and rounded to
// the dtype before the product, which is rounded again.
struct GatedActivationParams {
  const void* x = nullptr;                            // [rows, 2 columns]
  void* out = nullptr;                                // [rows, columns]
  std::int64_t x_row_stride = 0, out_row_stride = 0;  // elements
  std::int32_t rows = 0, columns = 0;
  DType dtype = DType::kF32;
  GateActivation activation = GateActivation::kSilu;
  ExecutionContext exec;
};

}  // namespace specdec
