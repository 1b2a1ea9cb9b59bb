#include "backend/cpu/linear/linear_call.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "backend/cpu/decoder/row_ops.h"
#include "base/thread_pool.h"

namespace specdec::cpu {
namespace {

// Rows converted at a time: bounds the scratch of a long prefill.
constexpr std::int64_t kChunkRows = 256;
// Elements of a row that a thread converts in a nanosecond.
constexpr std::int64_t kConvertedPerNs = 4;

// Memory of one calling thread, reused by all its calls.
std::byte* scratch(std::vector<std::byte>& buffer, std::int64_t bytes) {
  if (static_cast<std::int64_t>(buffer.size()) < bytes) buffer.resize(bytes);
  return buffer.data();
}

void convert_row(const std::byte* from, DType from_dtype, std::int64_t n, std::byte* to,
                 DType to_dtype, float* wide) {
  const RowOps& ops = row_ops();
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, n * dtype_bytes(to_dtype));
    return;
  }
  const float* values = reinterpret_cast<const float*>(from);
  if (from_dtype != DType::kF32) {
    float* target = to_dtype == DType::kF32 ? reinterpret_cast<float*>(to) : wide;
    const auto* bits = reinterpret_cast<const std::uint16_t*>(from);
    from_dtype == DType::kBF16 ? ops.bf16_to_f32(bits, n, target) : ops.f16_to_f32(bits, n, target);
    values = target;
  }
  if (to_dtype == DType::kBF16) ops.f32_to_bf16(values, n, reinterpret_cast<std::uint16_t*>(to));
  if (to_dtype == DType::kF16) ops.f32_to_f16(values, n, reinterpret_cast<std::uint16_t*>(to));
}

// A row of k elements in the form that the products take; `wide` is scratch of as many floats.
void convert_input(InputForm form, std::int64_t k, const std::byte* from, DType dtype,
                   std::byte* to, float* wide) {
  if (form == InputForm::kQuant) {
    convert_row(from, dtype, k, reinterpret_cast<std::byte*>(wide), DType::kF32, nullptr);
    row_ops().f32_to_quant(wide, k, reinterpret_cast<QuantBlock*>(to));
    return;
  }
  const DType target = form == InputForm::kF32 ? DType::kF32 : DType::kBF16;
  convert_row(from, dtype, k, to, target, wide);
  const auto bytes = k * static_cast<std::int64_t>(dtype_bytes(target));
  std::memset(to + bytes, 0, input_row_bytes(form, k) - bytes);
  if (form == InputForm::kE4M3) {
    row_ops().round_to_e4m3(k, reinterpret_cast<std::uint16_t*>(to));
  }
}

}  // namespace

void run_linear(const PackedLinear& linear, const TensorView& x, const TensorView& out, bool fast) {
  static thread_local std::vector<std::byte> x_buffer, y_buffer;
  const std::int64_t rows = x.shape[0], k = linear.k(), n = linear.n();
  const InputForm form = fast ? linear.fast_form(rows) : linear.input_form();
  const auto x_bytes = static_cast<std::int64_t>(dtype_bytes(x.dtype));
  const auto out_bytes = static_cast<std::int64_t>(dtype_bytes(out.dtype));
  // The kernels read x in words of 4 bytes, and an odd K needs a pad that the caller's rows lack.
  const bool words = reinterpret_cast<std::uintptr_t>(x.data) % 4 == 0 &&
                     (rows <= 1 || x.strides[0] * x_bytes % 4 == 0);
  const bool fits = (form == InputForm::kF32 && x.dtype == DType::kF32) ||
                    (form == InputForm::kBF16 && x.dtype == DType::kBF16 && k % 2 == 0);
  const bool x_direct = fits && words;
  const bool y_direct = out.dtype == DType::kF32;
  const std::int64_t chunk = x_direct && y_direct ? rows : std::min(rows, kChunkRows);
  // The odd stride in cache lines keeps the rows of a tile out of each other's cache sets.
  const std::int64_t scratch_stride = input_row_bytes(form, k) + 64;
  std::byte* x_scratch = x_direct ? nullptr : scratch(x_buffer, chunk * scratch_stride);
  float* y_scratch =
      y_direct ? nullptr : reinterpret_cast<float*>(scratch(y_buffer, chunk * n * 4));
  ThreadPool& pool = ThreadPool::global();
  const ThreadPool::Hold threads(pool);
  std::vector<float> wide(x_direct ? 0 : static_cast<std::size_t>(pool.size()) * k);
  for (std::int64_t first = 0; first < rows; first += chunk) {
    const std::int64_t count = std::min(chunk, rows - first);
    const std::byte* x_rows =
        static_cast<const std::byte*>(x.data) + first * x.strides[0] * x_bytes;
    std::byte* out_rows = static_cast<std::byte*>(out.data) + first * out.strides[0] * out_bytes;
    if (!x_direct) {
      pool.run_items(count, k / kConvertedPerNs, [&](Range range, int rank) {
        for (std::int64_t r = range.begin; r < range.end; ++r) {
          convert_input(form, k, x_rows + r * x.strides[0] * x_bytes, x.dtype,
                        x_scratch + r * scratch_stride, wide.data() + rank * k);
        }
      });
    }
    const InputRows input{x_direct ? x_rows : x_scratch,
                          x_direct ? x.strides[0] * x_bytes : scratch_stride, count, form};
    linear.run(input, y_direct ? reinterpret_cast<float*>(out_rows) : y_scratch,
               y_direct ? out.strides[0] : n);
    if (y_direct) continue;
    pool.run_items(count, n / kConvertedPerNs, [&](Range range, int) {
      for (std::int64_t r = range.begin; r < range.end; ++r) {
        convert_row(reinterpret_cast<const std::byte*>(y_scratch + r * n), DType::kF32, n,
                    out_rows + r * out.strides[0] * out_bytes, out.dtype, nullptr);
      }
    });
  }
}

}  // namespace specdec::cpu
