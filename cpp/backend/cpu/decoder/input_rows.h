// Rows written in the form that the next linear layer takes them in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cpu/decoder/row_ops.h"
#include "backend/cpu/linear/packed_linear.h"

namespace specdec::cpu {

// out = x[n].
void convert_row(const RowOps& ops, InputForm form, const float* x, std::int64_t n, std::byte* out);

// out = weight * (x / sqrt(mean(x^2) + eps)), [n].
void norm_row(const RowOps& ops, InputForm form, const float* x, const float* weight,
              std::int64_t n, float eps, std::byte* out);

// out = act(gate) * up, [n]: SiLU, or else GELU in its tanh form.
void activate_row(const RowOps& ops, InputForm form, bool silu, const float* gate, const float* up,
                  std::int64_t n, std::byte* out);

}  // namespace specdec::cpu
