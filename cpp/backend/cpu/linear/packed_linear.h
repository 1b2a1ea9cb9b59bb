// A linear layer y = x W^T + b for few rows: weights prepacked once, streamed once per call.
//
// Exactness: y[m, n] is a sum of chains of multiply-adds over stretches of 128 steps of k, in
// ascending order, then + b[n]. It does not depend on the number of rows, the row's place, or
// threads. (A step is one k, for bf16 weights a pair: one dot-product-of-two with avx512_bf16.)
// For e4m3 weights a stretch is 32 steps, 64 k, and its sum is multiplied by the column's scale
// before it is added; in f8_a8 the sum of all is multiplied by the row's scale before the bias.
// For quantised weights it is the sum of quant_kernels.h, over steps of 32 k, just as fixed. Many
// rows may take another way where a caller asks for it (fast_form): then y is that of bf16 weights,
// the elements rounded, and depends on the number of rows in so far as the caller chose by it.
//
// x is in input_form() or fast_form(). y is float32.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "backend/cpu/linear/weight_type.h"
#include "base/tensor_view.h"
#include "base/thread_pool.h"
#include "base/types.h"

namespace specdec::cpu {

struct LinearKernels;
struct QuantKernels;

// Columns of one panel: the unit of packing and of the split over threads.
inline constexpr int kPanelColumns = 32;

// The best column of a row so far; see PackedLinear::argmax_part.
struct RowBest {
  float value = -std::numeric_limits<float>::infinity();
  std::int32_t index = kNone;

  static constexpr std::int32_t kNone = -2;  // nothing seen
  static constexpr std::int32_t kNaN = -1;   // a NaN was seen; sticks
};

// How the rows of x lie: float32 for fp32 and fp16 weights, bfloat16 for bf16 and f8_g weights,
// e4m3 numbers as bfloat16 with the row's scale behind them (RowOps::round_to_e4m3) for f8_a8
// weights, QuantBlocks (quant_row.h) for quantised weights.
enum class InputForm : std::uint8_t { kF32, kBF16, kE4M3, kQuant };

// Bytes of a row of k elements that the kernels read; what is behind k must be 0.
std::int64_t input_row_bytes(InputForm form, std::int64_t k);
// Bytes in front of element k, a multiple of 32.
std::int64_t input_offset(InputForm form, std::int64_t k);

// Rows of x, all in one form, row_bytes apart.
struct InputRows {
  const void* data;
  std::int64_t row_bytes, rows;
  InputForm form;

  InputRows part(std::int64_t first, std::int64_t count) const {
    return {static_cast<const std::byte*>(data) + first * row_bytes, row_bytes, count, form};
  }
};

// A weight [N, K]: floats, or uint8 [N, bytes of a row] in a block format.
struct WeightView {
  WeightView(const TensorView& tensor)  // NOLINT(google-explicit-constructor): a float tensor
      : view(tensor),
        type(tensor.dtype == DType::kBF16  ? WeightType::kBF16
             : tensor.dtype == DType::kF16 ? WeightType::kF16
                                           : WeightType::kF32) {}
  WeightView(const TensorView& bytes, WeightType format) : view(bytes), type(format) {}

  // Elements of a row; for bytes that are no whole blocks -1.
  std::int64_t columns() const;

  TensorView view;
  WeightType type;
};

// Raised when the bytes of a pack mean something else than before: files of packs name it.
inline constexpr int kPackLayout = 1;

// A pack as it lies in memory or in a file: panels of kPanelColumns columns, padding included. The
// layout depends on type, n and k alone, not on the instruction set or the number of threads.
struct PackedView {
  WeightType type = WeightType::kF32;
  std::int64_t n = 0, k = 0;
  const std::byte* data = nullptr;    // aligned to 64 bytes
  const float* bias = nullptr;        // [n], or null
  std::shared_ptr<const void> owner;  // keeps data alive; null: the caller does
};
// Bytes of a pack [n, k]; -1 where k is no whole blocks or the number is none that can be.
std::int64_t packed_bytes(WeightType type, std::int64_t n, std::int64_t k);

class PackedLinear {
 public:
  // weights: one or more of one type and one K, inner dimension contiguous, stacked along N (fused
  // q, k, v). biases: empty, or per weight an undefined view (no bias) or a contiguous [N_i] tensor
  // of any of the three float dtypes. Everything is copied, block formats without loss; packing
  // runs on ThreadPool::global(). Errors: std::invalid_argument for shapes, strides, dtypes and
  // scales that are not finite.
  explicit PackedLinear(const std::vector<WeightView>& weights,
                        const std::vector<TensorView>& biases = {});
  // A pack that is used where it lies; nothing but the bias is copied.
  explicit PackedLinear(const PackedView& packed);
  ~PackedLinear();
  PackedLinear(PackedLinear&&) noexcept;
  PackedLinear& operator=(PackedLinear&&) noexcept;

  std::int64_t n() const { return n_; }
  std::int64_t k() const { return k_; }
  WeightType type() const { return type_; }
  InputForm input_form() const {
    if (is_quantised(type_)) return InputForm::kQuant;
    if (type_ == WeightType::kF8A8) return InputForm::kE4M3;
    return type_ == WeightType::kBF16 || type_ == WeightType::kF8G ? InputForm::kBF16
                                                                   : InputForm::kF32;
  }
  // What so many rows may be in, too, if it is faster for them: bf16 in place of 8 bits on
  // processors with tiles, for many_rows() or more.
  InputForm fast_form(std::int64_t rows) const;
  // 0: however many there are, fast_form is input_form.
  std::int64_t many_rows() const;
  // Bytes of packed weights and biases, padding included.
  std::size_t bytes() const { return bytes_; }
  // What is packed, for as long as this object lives.
  PackedView view() const {
    return {type_, n_, k_, packed_, bias_.empty() ? nullptr : bias_.data(), nullptr};
  }

  // Into how many parts a call with so many rows is cut for ThreadPool::global(), if `matrices` of
  // this shape are multiplied together.
  int num_parts(std::int64_t rows, int matrices = 1) const;

  // The columns of a part: the same for every linear layer with this n.
  Range columns_of(int part, int parts) const {
    const Range panels = share(panels_, part, parts);
    return {std::min(panels.begin * kPanelColumns, n_), std::min(panels.end * kPanelColumns, n_)};
  }

  // y[rows, n] = x[rows, k] W^T + b, dealt out over ThreadPool::global(); y_stride: elements.
  // Allocates nothing.
  void run(const InputRows& x, float* y, std::int64_t y_stride) const;

  // Columns of the widest of so many parts; a multiple of kPanelColumns.
  std::int64_t most_columns(int parts) const {
    return (panels_ + parts - 1) / parts * kPanelColumns;
  }

  // A call of run() with so many rows comes soon: tells ThreadPool::global(), whose size the caller
  // holds, which weights each thread begins with. `other`: has the same shape, and parts of both
  // are computed in turns.
  void expect(std::int64_t rows, const PackedLinear* other = nullptr) const;

  // One part of it, for use inside a piece of work: y[rows, columns_of(part, parts)]. Columns are
  // split, so each part reads only its own weights.
  void run_part(const InputRows& x, float* y, std::int64_t y_stride, int part, int parts) const;

  // As run_part, but keeps only the best column per row: best[rows] of this part is overwritten.
  // merge_best() joins the parts afterwards.
  void argmax_part(const InputRows& x, RowBest* best, int part, int parts) const;

  // Reads a part of the packed weights and does nothing else; returns a checksum. This is the floor
  // that benchmarks hold run against, on the same memory.
  std::uint64_t read_part(int part, int parts) const;
  // The same of all, over ThreadPool::global(): the floor of run(). Returns a checksum.
  std::uint64_t read() const;

  // out[k] = row `row` of the weights as float32: a tied head serves as the embedding table.
  void unpack_row(std::int64_t row, float* out) const;

 private:
  // Everything that follows from type_, n_ and k_.
  void take_layout();
  void pack(const std::vector<WeightView>& weights, std::byte* packed);
  template <typename Sink>
  void for_each_tile(const InputRows& input, int part, int parts, Sink&& sink) const;
  template <typename Sink>
  void for_each_quant_tile(const InputRows& input, int part, int parts, Sink&& sink) const;

  std::int64_t n_ = 0, k_ = 0, panels_ = 0;
  std::int64_t steps_ = 0;        // k, pairs of k for bf16 and e4m3, groups of 32 if quantised
  std::int64_t panel_bytes_ = 0;  // steps_ * bytes of one step of kPanelColumns columns
  std::size_t bytes_ = 0;
  WeightType type_ = WeightType::kF32;
  const LinearKernels* kernels_ = nullptr;
  const QuantKernels* quant_kernels_ = nullptr;
  std::shared_ptr<const void> owner_;  // keeps packed_ alive
  const std::byte* packed_ = nullptr;
  std::vector<float> bias_;  // empty, or panels_ * kPanelColumns
};

// found: [parts, rows], part after part. best[rows]: the largest value, the first on ties; index
// -1 if the row holds a NaN.
void merge_best(const RowBest* found, int parts, std::int64_t rows, RowBest* best);

}  // namespace specdec::cpu
