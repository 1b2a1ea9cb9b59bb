// PackedLinear: from tensors to packs, and rows back.
#include <atomic>
#include <cmath>
#include <cstring>

#include "backend/cpu/e4m3.h"
#include "backend/cpu/half.h"
#include "backend/cpu/linear/linear_kernels.h"
#include "backend/cpu/linear/packed_linear.h"
#include "backend/cpu/linear/quant_kernels.h"
#include "backend/cpu/linear/quant_pack.h"
#include "backend/cpu/linear/weight_memory.h"
#include "base/check.h"

namespace specdec::cpu {
namespace {

constexpr int kColumns = kPanelColumns;

float element(const std::byte* p, DType dtype) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, p, sizeof(value));
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

// Writes one column of a panel, k ascending.
template <typename T>
void pack_column(const T* row, std::int64_t k, bool pairs, int column, T* panel) {
  if (!pairs) {
    for (std::int64_t i = 0; i < k; ++i) panel[i * kColumns + column] = row[i];
  } else {
    for (std::int64_t i = 0; i < k; ++i) {
      panel[(i / 2) * 2 * kColumns + 2 * column + (i & 1)] = row[i];
    }
  }
}

// Writes one column of a panel of steps; false if a scale or minimum is not finite.
bool pack_blocks(WeightType type, const std::byte* row, std::int64_t steps, int column,
                 std::byte* panel) {
  const std::int64_t step_bytes = quant_format(type).step_bytes();
  bool finite = true;
  for (std::int64_t step = 0; step < steps; ++step) {
    const Group group = read_group(type, row, step);
    finite = finite && std::isfinite(group.scale[0]) && std::isfinite(group.scale[1]) &&
             std::isfinite(group.min);
    pack_group(type, group, column, panel + step * step_bytes);
  }
  return finite;
}

// The same in f8_g; false if a scale is not finite, or a code is NaN.
bool pack_scaled(const std::byte* row, std::int64_t k, int column, std::byte* panel) {
  bool finite = true;
  for (std::int64_t group = 0; group < k / kScaledGroup; ++group) {
    const std::byte* block = row + group * (kScaledGroup + 4);
    std::byte* out = panel + group * scaled_group_bytes();
    float scale;
    std::memcpy(&scale, block, sizeof(scale));
    std::memcpy(out + column * sizeof(scale), &scale, sizeof(scale));
    finite = finite && std::isfinite(scale);
    std::byte* codes = out + kColumns * sizeof(scale);
    for (int i = 0; i < kScaledGroup; ++i) {
      const std::byte code = block[sizeof(scale) + i];
      codes[i / 2 * 2 * kColumns + scaled_place(column) + i % 2] = code;
      finite = finite && (code & std::byte{0x7f}) != std::byte{0x7f};
    }
  }
  return finite;
}

}  // namespace

PackedLinear::PackedLinear(const std::vector<WeightView>& weights,
                           const std::vector<TensorView>& biases) {
  SPECDEC_REQUIRE(!weights.empty(), "linear.weights: empty, give at least one [N, K] tensor");
  SPECDEC_REQUIRE(biases.empty() || biases.size() == weights.size(),
                  "linear.biases: ", biases.size(), " for ", weights.size(),
                  " weights: give one per weight or none");
  type_ = weights[0].type;
  SPECDEC_REQUIRE(weights[0].view.ndim == 2, "linear.weight: ", weights[0].view.ndim,
                  " dimensions, needs 2: [N, K]");
  k_ = weights[0].columns();
  bool any_bias = false;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const TensorView& w = weights[i].view;
    SPECDEC_REQUIRE(w.device == DeviceType::kCpu, "linear.weights[", i,
                    "]: on a GPU, copy it to the CPU first");
    SPECDEC_REQUIRE(is_block_format(weights[i].type) ? w.dtype == DType::kU8 : is_float(w.dtype),
                    "linear.weights[", i, "]: dtype ", dtype_name(w.dtype),
                    ": convert to float32, bfloat16 or float16");
    SPECDEC_REQUIRE(weights[i].type == type_, "linear.weights[", i, "]: type ",
                    weight_type_name(weights[i].type), ", the first weight has ",
                    weight_type_name(type_), ": stacked weights share one");
    SPECDEC_REQUIRE(
        w.ndim == 2 && w.shape[0] >= 1 && weights[i].columns() == k_ && k_ >= 1, "linear.weights[",
        i, "]: every weight is [N >= 1, K >= 1] with the same K = ", k_, ", in whole blocks");
    SPECDEC_REQUIRE(w.shape[1] == 1 || w.strides[1] == 1, "linear.weights[", i, "]: stride ",
                    w.strides[1], " along K: call .contiguous() first");
    n_ += w.shape[0];
    if (biases.empty() || !biases[i].defined()) continue;
    const TensorView& b = biases[i];
    SPECDEC_REQUIRE(b.device == DeviceType::kCpu && b.ndim == 1 && b.shape[0] == w.shape[0] &&
                        b.is_contiguous() && is_float(b.dtype),
                    "linear.biases[", i, "]: needs a contiguous CPU float tensor of shape [",
                    w.shape[0], "]");
    any_bias = true;
  }
  take_layout();
  if (any_bias) {
    bias_.assign(static_cast<std::size_t>(panels_ * kColumns), 0.0f);
    std::int64_t first = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const TensorView& b = biases[i];
      for (std::int64_t j = 0; b.defined() && j < b.shape[0]; ++j) {
        const auto* p = static_cast<const std::byte*>(b.data);
        bias_[first + j] = element(p + j * dtype_bytes(b.dtype), b.dtype);
      }
      first += weights[i].view.shape[0];
    }
  }
  bytes_ = static_cast<std::size_t>(panels_ * panel_bytes_) + bias_.size() * sizeof(float);
  const auto block = WeightBlock::allocate(static_cast<std::size_t>(panels_ * panel_bytes_));
  packed_ = block->data();
  owner_ = block;
  pack(weights, block->data());
}

void PackedLinear::pack(const std::vector<WeightView>& weights, std::byte* packed) {
  std::atomic<std::int64_t> bad_row{-1};
  // Owned as run()'s pieces are: a page is first touched by the thread that will read it.
  ThreadPool::global().run_items(panels_, k_ * kColumns, [&](Range range, int) {
    for (std::int64_t panel = range.begin; panel < range.end; ++panel) {
      std::byte* out = packed + panel * panel_bytes_;
      std::size_t source = 0;
      std::int64_t row = panel * kColumns;  // within weights[source], once the loop has run
      for (int column = 0; column < kColumns && panel * kColumns + column < n_; ++column, ++row) {
        while (row >= weights[source].view.shape[0]) row -= weights[source++].view.shape[0];
        const TensorView& w = weights[source].view;
        const auto* data = static_cast<const std::byte*>(w.data) +
                           row * w.strides[0] * static_cast<std::int64_t>(dtype_bytes(w.dtype));
        if (is_e4m3(type_)) {
          if (!pack_scaled(data, k_, column, out)) bad_row = panel * kColumns + column;
        } else if (is_block_format(type_)) {
          if (!pack_blocks(type_, data, steps_, column, out)) bad_row = panel * kColumns + column;
        } else if (type_ == WeightType::kF32) {
          pack_column(reinterpret_cast<const std::uint32_t*>(data), k_, false, column,
                      reinterpret_cast<std::uint32_t*>(out));
        } else {
          pack_column(reinterpret_cast<const std::uint16_t*>(data), k_, type_ == WeightType::kBF16,
                      column, reinterpret_cast<std::uint16_t*>(out));
        }
      }
    }
  });
  SPECDEC_REQUIRE(bad_row < 0, "linear.weights: row ", bad_row.load(), " holds a ",
                  is_e4m3(type_) ? "scale or a value" : "scale", " in ", weight_type_name(type_),
                  " that is not finite: the file is damaged");
}

void PackedLinear::unpack_row(std::int64_t row, float* out) const {
  const std::byte* panel = packed_ + row / kColumns * panel_bytes_;
  const int column = static_cast<int>(row % kColumns);
  if (is_e4m3(type_)) {
    for (std::int64_t i = 0; i < k_; ++i) {
      const std::byte* group = panel + i / kScaledGroup * scaled_group_bytes();
      const std::int64_t at = i % kScaledGroup / 2 * 2 * kColumns + scaled_place(column) + i % 2;
      float scale;
      std::memcpy(&scale, group + column * sizeof(scale), sizeof(scale));
      const auto code = static_cast<std::uint8_t>(group[kColumns * sizeof(scale) + at]);
      out[i] = scale * e4m3_to_float(code);
    }
    return;
  }
  if (is_block_format(type_)) {
    const std::int64_t step_bytes = panel_bytes_ / steps_;
    for (std::int64_t step = 0; step < steps_; ++step) {
      group_values(type_, unpack_group(type_, panel + step * step_bytes, column),
                   out + step * kGroup);
    }
    return;
  }
  const DType dtype = float_dtype(type_);
  const auto size = static_cast<std::int64_t>(dtype_bytes(dtype));
  for (std::int64_t i = 0; i < k_; ++i) {
    const std::int64_t index = dtype == DType::kBF16 ? (i / 2) * 2 * kColumns + 2 * column + (i & 1)
                                                     : i * kColumns + column;
    out[i] = element(panel + index * size, dtype);
  }
}

}  // namespace specdec::cpu
