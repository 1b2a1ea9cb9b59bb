// Rows written in the form that the next linear layer takes them in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cpu/decoder/row_ops.h"
#include "backend/cpu/linear/packed_linear.h"

namespace specdec::cpu {

// A row's memory as what its form holds.
inline float* as_f32(std::byte* p) { return reinterpret_cast<float*>(p); }
inline std::uint16_t* as_bf16(std::byte* p) { return reinterpret_cast<std::uint16_t*>(p); }

// out = x[n].
void convert_row(const RowOps& ops, InputForm form, const float* x, std::int64_t n, std::byte* out);

// out = weight * (x / sqrt(mean(x^2) + eps)), [n].
void norm_row(const RowOps& ops, InputForm form, const float* x, const float* weight,
              std::int64_t n, float eps, std::byte* out);

// out = act(gate) * up, [n], perhaps a stretch of a row: SiLU, or else GELU in its tanh form. What
// is to be rounded by its whole row (kE4M3) is left to round_row().
void activate_row(const RowOps& ops, InputForm form, bool silu, const float* gate, const float* up,
                  std::int64_t n, std::byte* out);

// What a form asks of a whole row whose stretches are written.
void round_row(const RowOps& ops, InputForm form, std::int64_t n, std::byte* row);

}  // namespace specdec::cpu
