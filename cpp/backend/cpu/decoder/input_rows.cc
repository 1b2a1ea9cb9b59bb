#include "backend/cpu/decoder/input_rows.h"

#include <cstring>

namespace specdec::cpu {
namespace {

QuantBlock* as_quant(std::byte* p) { return reinterpret_cast<QuantBlock*>(p); }

// A row of pairs ends in one that is half a number where n is odd: its other half has to be zero.
// Rows of other widths lie in the same memory.
void end_row(std::int64_t n, std::byte* out) {
  if (n % 2 != 0) as_bf16(out)[n] = 0;
}

}  // namespace

void convert_row(const RowOps& ops, InputForm form, const float* x, std::int64_t n,
                 std::byte* out) {
  switch (form) {
    case InputForm::kF32:
      std::memcpy(out, x, n * sizeof(float));
      break;
    case InputForm::kBF16:
    case InputForm::kE4M3:
      ops.f32_to_bf16(x, n, as_bf16(out));
      end_row(n, out);
      round_row(ops, form, n, out);
      break;
    case InputForm::kQuant:
      ops.f32_to_quant(x, n, as_quant(out));
      break;
  }
}

void norm_row(const RowOps& ops, InputForm form, const float* x, const float* weight,
              std::int64_t n, float eps, std::byte* out) {
  switch (form) {
    case InputForm::kF32:
      ops.rms_norm_f32(x, weight, n, eps, as_f32(out));
      break;
    case InputForm::kBF16:
    case InputForm::kE4M3:
      ops.rms_norm_bf16(x, weight, n, eps, as_bf16(out));
      end_row(n, out);
      round_row(ops, form, n, out);
      break;
    case InputForm::kQuant:
      ops.rms_norm_quant(x, weight, n, eps, as_quant(out));
      break;
  }
}

void activate_row(const RowOps& ops, InputForm form, bool silu, const float* gate, const float* up,
                  std::int64_t n, std::byte* out) {
  switch (form) {
    case InputForm::kF32:
      (silu ? ops.silu_mul_f32 : ops.gelu_mul_f32)(gate, up, n, as_f32(out));
      break;
    case InputForm::kBF16:
    case InputForm::kE4M3:
      (silu ? ops.silu_mul_bf16 : ops.gelu_mul_bf16)(gate, up, n, as_bf16(out));
      end_row(n, out);
      break;
    case InputForm::kQuant:
      (silu ? ops.silu_mul_quant : ops.gelu_mul_quant)(gate, up, n, as_quant(out));
      break;
  }
}

void round_row(const RowOps& ops, InputForm form, std::int64_t n, std::byte* row) {
  if (form == InputForm::kE4M3) ops.round_to_e4m3(n, as_bf16(row));
}

}  // namespace specdec::cpu
