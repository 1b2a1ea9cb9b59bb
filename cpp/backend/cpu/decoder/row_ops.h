// The element-wise work between the linear layers, one row (or a stretch of one) per call.
//
// Every instruction set runs the same C++ text without contraction, sums of squares in 16 fixed
// lanes: a result depends only on the row, not on the instruction set, threads or other rows.
#pragma once

#include <cstdint>

#include "backend/cpu/linear/quant_row.h"
#include "base/cpu_features.h"

namespace specdec::cpu {

struct RowOps {
  // out = weight * (x / sqrt(mean(x^2) + eps)), [n]; out may be x in the float32 form.
  void (*rms_norm_f32)(const float* x, const float* weight, std::int64_t n, float eps, float* out);
  void (*rms_norm_bf16)(const float* x, const float* weight, std::int64_t n, float eps,
                        std::uint16_t* out);
  // The _quant forms are the float32 forms with f32_to_quant behind: the same bits.
  void (*rms_norm_quant)(const float* x, const float* weight, std::int64_t n, float eps,
                         QuantBlock* out);
  // x += y, [n].
  void (*add)(const float* y, std::int64_t n, float* x);
  // out = act(gate) * up, [n]. SiLU, and GELU in its tanh form.
  void (*silu_mul_f32)(const float* gate, const float* up, std::int64_t n, float* out);
  void (*silu_mul_bf16)(const float* gate, const float* up, std::int64_t n, std::uint16_t* out);
  void (*gelu_mul_f32)(const float* gate, const float* up, std::int64_t n, float* out);
  void (*gelu_mul_bf16)(const float* gate, const float* up, std::int64_t n, std::uint16_t* out);
  void (*silu_mul_quant)(const float* gate, const float* up, std::int64_t n, QuantBlock* out);
  void (*gelu_mul_quant)(const float* gate, const float* up, std::int64_t n, QuantBlock* out);
  // Rotates x[0..half) with x[half..2 half) in place; cos, sin [half].
  void (*rope)(const float* cos, const float* sin, std::int64_t half, float* x);
  // Each of these bfloat16 numbers, [n], becomes the e4m3 number that stands for it; behind them,
  // as 4 bytes, the row's scale, by which they are multiplied (algo/e4m3_row.h).
  void (*round_to_e4m3)(std::int64_t n, std::uint16_t* x);
  // Conversions, nearest even.
  void (*f32_to_bf16)(const float* x, std::int64_t n, std::uint16_t* out);
  void (*bf16_to_f32)(const std::uint16_t* x, std::int64_t n, float* out);
  void (*f32_to_f16)(const float* x, std::int64_t n, std::uint16_t* out);
  void (*f16_to_f32)(const std::uint16_t* x, std::int64_t n, float* out);
  // x / scale as e4m3; what is larger than 448, infinity included, becomes 448.
  void (*f32_to_e4m3)(const float* x, std::int64_t n, float scale, std::uint8_t* out);
  // A vector of K or V: n numbers round(x * 127 / max |x|) and behind them, as 4 bytes, the float32
  // max |x| / 127 that they are multiplied by. It depends on this vector alone. All zeros where
  // max |x| is below 1e-30; numbers 0 and a scale of NaN where x holds a NaN or an infinity.
  void (*f32_to_int8)(const float* x, std::int64_t n, std::int8_t* out);
  // Pairs of blocks (quant_row.h) of 32 elements; n is a multiple of that, here and in the other
  // _quant forms.
  void (*f32_to_quant)(const float* x, std::int64_t n, QuantBlock* out);
};

// The table of cpu_isa().
const RowOps& row_ops();

const RowOps& row_ops_plain();
const RowOps& row_ops_avx2();
const RowOps& row_ops_avx512();

}  // namespace specdec::cpu
