#include "backend/cpu/linear/packed_linear.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "backend/cpu/e4m3.h"
#include "backend/cpu/half.h"
#include "backend/cpu/linear/linear_kernels.h"
#include "backend/cpu/linear/quant_kernels.h"
#include "backend/cpu/linear/quant_pack.h"
#include "backend/cpu/linear/weight_memory.h"
#include "base/check.h"
#include "base/thread_pool.h"

namespace specdec::cpu {
namespace {

constexpr int kColumns = kPanelColumns;
// Links of one chain; the sums of successive chains are added up in order. Short chains keep the
// rounding error small, and a panel's stretch of this length stays in the first-level cache while
// several row tiles use it.
constexpr std::int64_t kChainSteps = 128;
static_assert(kChainSteps % (kScaledGroup / 2) == 0);
// Many rows of x on quantised weights: a block of panels stays in the second-level cache while
// tiles of few rows pass over it. A tile's rows (26 KB for 576 columns) then stay in the
// first-level one.
constexpr std::int64_t kPanelBlockBytes = 256 * 1024;
constexpr std::int64_t kPrefillTileRows = 15;
// How far ahead of the reads a lone row tile fetches.
constexpr std::int64_t kPrefetchBytes = 8192;

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

std::int64_t input_row_bytes(InputForm form, std::int64_t k) {
  switch (form) {
    case InputForm::kBF16:
      return (k + 1) / 2 * 4;
    case InputForm::kQuant:
      return (k + kGroup - 1) / kGroup * static_cast<std::int64_t>(2 * sizeof(QuantBlock));
    default:
      return k * 4;
  }
}

std::int64_t WeightView::columns() const {
  const BlockSize size = block_size(type);
  if (!is_block_format(type)) return view.shape[1];
  return view.shape[1] % size.bytes == 0 ? view.shape[1] / size.bytes * size.elements : -1;
}

PackedLinear::~PackedLinear() = default;
PackedLinear::PackedLinear(PackedLinear&&) noexcept = default;
PackedLinear& PackedLinear::operator=(PackedLinear&&) noexcept = default;

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
  ThreadPool& pool = ThreadPool::global();
  std::atomic<std::int64_t> bad_row{-1};
  pool.run([&](int rank) {
    // The same split as run_part: a page is first touched by the thread that will read it.
    const auto range = pool.part(panels_, rank);
    for (std::int64_t panel = range.begin; panel < range.end; ++panel) {
      std::byte* out = packed + panel * panel_bytes_;
      std::size_t source = 0;
      std::int64_t row = panel * kColumns;  // within weights[source], once the loop has run
      for (int column = 0; column < kColumns && panel * kColumns + column < n_; ++column, ++row) {
        while (row >= weights[source].view.shape[0]) row -= weights[source++].view.shape[0];
        const TensorView& w = weights[source].view;
        const auto* data = static_cast<const std::byte*>(w.data) +
                           row * w.strides[0] * static_cast<std::int64_t>(dtype_bytes(w.dtype));
        if (type_ == WeightType::kF8G) {
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
                  type_ == WeightType::kF8G ? "scale or a value" : "scale", " in ",
                  weight_type_name(type_), " that is not finite: the file is damaged");
}

// Calls sink(panel, first_row, num_rows, run) for every tile of this rank, where run(y, y_stride)
// computes one stretch of the tile's chains and adds it to y (the first one replaces y).
template <typename Sink>
void PackedLinear::for_each_tile(const std::byte* x, std::int64_t x_row_bytes, std::int64_t rows,
                                 int rank, int nranks, Sink&& sink) const {
  if (is_quantised(type_)) {
    for_each_quant_tile(x, x_row_bytes, rows, rank, nranks, sink);
    return;
  }
  const std::int64_t first_panel = panels_ * rank / nranks;
  const std::int64_t last_panel = panels_ * (rank + 1) / nranks;
  const std::int64_t max_rows = kernels_->max_rows;
  const std::int64_t tiles = (rows + max_rows - 1) / max_rows;
  const bool scaled = type_ == WeightType::kF8G;
  const bool widens = scaled && kernels_->widen != nullptr;
  const TileFn* table = type_ == WeightType::kF32   ? kernels_->f32
                        : type_ == WeightType::kF16 ? kernels_->f16
                        : scaled && !widens         ? kernels_->e4m3
                                                    : kernels_->bf16;
  const std::int64_t step_bytes = panel_bytes_ / steps_;
  const std::int64_t stretch = widens ? kScaledGroup / 2 : kChainSteps;
  alignas(64) std::uint16_t wide[kScaledCodes];
  for (std::int64_t panel = first_panel; panel < last_panel; ++panel) {
    for (std::int64_t step = 0; step < steps_; step += stretch) {
      const std::int64_t count = std::min(stretch, steps_ - step);
      const bool last_block = step + count == steps_;
      TileArgs args;
      args.panel = packed_ + panel * panel_bytes_ + step * step_bytes;
      args.scale = nullptr;
      if (widens) {
        args.scale = reinterpret_cast<const float*>(args.panel);
        const std::byte* codes = args.panel + kColumns * sizeof(float);
        __builtin_prefetch(args.panel + kPrefetchBytes);
        __builtin_prefetch(args.panel + kPrefetchBytes + 64);
        kernels_->widen(codes, wide, codes + kPrefetchBytes);
        args.panel = reinterpret_cast<const std::byte*>(wide);
      }
      args.x_row_bytes = x_row_bytes;
      args.steps = count;
      args.bias = last_block && !bias_.empty() ? bias_.data() + panel * kColumns : nullptr;
      args.resume = step != 0;
      for (std::int64_t tile = 0; tile < tiles; ++tile) {
        const std::int64_t row = rows * tile / tiles;
        const int height = static_cast<int>(rows * (tile + 1) / tiles - row);
        args.x = x + row * x_row_bytes + step * 4;
        // The last of several tiles reads the panel from the cache, so it fetches the next one.
        const bool fetch_next = tiles > 1 && tile + 1 == tiles;
        args.prefetch = args.panel + (fetch_next ? count * step_bytes : kPrefetchBytes);
        if (widens) args.prefetch = args.panel;  // widen() has fetched
        sink(panel, row, height, last_block, [&](float* y, std::int64_t y_stride) {
          args.y = y;
          args.y_stride = y_stride;
          table[height](args);
        });
      }
    }
  }
}

// The same for quantised weights: a tile is a whole panel, its stretches of k are done in one go.
// Row tiles pass over a block of panels before the next block is read.
template <typename Sink>
void PackedLinear::for_each_quant_tile(const std::byte* x, std::int64_t x_row_bytes,
                                       std::int64_t rows, int rank, int nranks, Sink&& sink) const {
  const QuantTileFn compute = quant_kernels_->of(type_);
  const std::int64_t most = rows <= kQuantTileRows ? kQuantTileRows : kPrefillTileRows;
  const std::int64_t tiles = (rows + most - 1) / most;
  const std::int64_t last_panel = panels_ * (rank + 1) / nranks;
  const std::int64_t block = std::max<std::int64_t>(1, kPanelBlockBytes / panel_bytes_);
  for (std::int64_t begin = panels_ * rank / nranks; begin < last_panel; begin += block) {
    const std::int64_t end = std::min(begin + block, last_panel);
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t row = rows * tile / tiles;
      QuantTileArgs args;
      args.x = x + row * x_row_bytes;
      args.x_row_bytes = x_row_bytes;
      args.rows = static_cast<int>(rows * (tile + 1) / tiles - row);
      args.steps = steps_;
      // The last of several tiles reads panels that are near, so it fetches the next block's.
      const bool fetch_next = tiles > 1 && tile + 1 == tiles;
      const std::int64_t ahead = fetch_next ? (end - begin) * panel_bytes_ : kPrefetchBytes;
      for (std::int64_t panel = begin; panel < end; ++panel) {
        args.panel = packed_ + panel * panel_bytes_;
        args.bias = bias_.empty() ? nullptr : bias_.data() + panel * kColumns;
        args.prefetch = args.panel + ahead;
        sink(panel, row, args.rows, true, [&](float* y, std::int64_t y_stride) {
          args.y = y;
          args.y_stride = y_stride;
          compute(args);
        });
      }
    }
  }
}

void PackedLinear::run_part(const void* x, std::int64_t x_row_bytes, std::int64_t rows, float* y,
                            std::int64_t y_stride, int rank, int nranks) const {
  if (rows <= 0) return;
  for_each_tile(static_cast<const std::byte*>(x), x_row_bytes, rows, rank, nranks,
                [&](std::int64_t panel, std::int64_t row, int height, bool, auto&& compute) {
                  float* out = y + row * y_stride + panel * kColumns;
                  const std::int64_t width =
                      std::min<std::int64_t>(kColumns, n_ - panel * kColumns);
                  if (width == kColumns) {
                    compute(out, y_stride);
                    return;
                  }
                  // The last panel is padded with zero columns, y is not.
                  alignas(64) float tile[kQuantTileRows * kColumns] = {};
                  for (int m = 0; m < height; ++m) {
                    std::copy_n(out + m * y_stride, width, tile + m * kColumns);
                  }
                  compute(tile, kColumns);
                  for (int m = 0; m < height; ++m) {
                    std::copy_n(tile + m * kColumns, width, out + m * y_stride);
                  }
                });
}

void PackedLinear::argmax_part(const void* x, std::int64_t x_row_bytes, std::int64_t rows,
                               RowBest* best, int rank, int nranks) const {
  std::fill_n(best, rows, RowBest{});
  // Scores of one panel for a slice of rows: all row tiles of the slice share one reading of it.
  constexpr std::int64_t kSliceRows = 120;
  alignas(64) float slice_scores[kSliceRows * kColumns];
  for (std::int64_t first = 0; first < rows; first += kSliceRows) {
    const std::int64_t slice = std::min(kSliceRows, rows - first);
    for_each_tile(
        static_cast<const std::byte*>(x) + first * x_row_bytes, x_row_bytes, slice, rank, nranks,
        [&](std::int64_t panel, std::int64_t from, int height, bool complete, auto&& compute) {
          float* tile = slice_scores + from * kColumns;
          compute(tile, kColumns);
          if (!complete) return;
          const int width =
              static_cast<int>(std::min<std::int64_t>(kColumns, n_ - panel * kColumns));
          for (int m = 0; m < height; ++m) {
            RowBest& row = best[first + from + m];
            const float* scores = tile + m * kColumns;
            // Negated: a NaN is not "<= best" either, so it is never overlooked.
            int candidates = 0;
            for (int c = 0; c < width; ++c) candidates |= !(scores[c] <= row.value);
            if (row.index == RowBest::kNone) candidates = 1;
            if (candidates == 0 || row.index == RowBest::kNaN) continue;
            for (int c = 0; c < width; ++c) {
              if (std::isnan(scores[c])) {
                row.index = RowBest::kNaN;
                break;
              }
              if (scores[c] > row.value || row.index == RowBest::kNone) {
                row.value = scores[c];
                row.index = static_cast<std::int32_t>(panel * kColumns + c);
              }
            }
          }
        });
  }
}

std::uint64_t PackedLinear::read_part(int rank, int nranks) const {
  // Panels are whole cache lines of 8 words; independent sums, so that only memory is waited for.
  const auto* words = reinterpret_cast<const std::uint64_t*>(packed_);
  const std::int64_t begin = panels_ * rank / nranks * panel_bytes_ / 8;
  const std::int64_t end = panels_ * (rank + 1) / nranks * panel_bytes_ / 8;
  std::uint64_t sums[8] = {};
  for (std::int64_t i = begin; i < end; i += 8) {
    __builtin_prefetch(words + i + kPrefetchBytes / 8);
    for (int j = 0; j < 8; ++j) sums[j] += words[i + j];
  }
  std::uint64_t total = 0;
  for (std::uint64_t sum : sums) total += sum;
  return total;
}

void PackedLinear::unpack_row(std::int64_t row, float* out) const {
  const std::byte* panel = packed_ + row / kColumns * panel_bytes_;
  const int column = static_cast<int>(row % kColumns);
  if (type_ == WeightType::kF8G) {
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

void merge_best(const RowBest* parts, int nranks, std::int64_t rows, RowBest* merged) {
  for (std::int64_t row = 0; row < rows; ++row) {
    RowBest best;
    for (int rank = 0; rank < nranks && best.index != RowBest::kNaN; ++rank) {
      const RowBest& part = parts[rank * rows + row];
      if (part.index == RowBest::kNone) continue;
      if (part.index == RowBest::kNaN || best.index == RowBest::kNone || part.value > best.value) {
        best = part;
      }
    }
    merged[row] = best;
  }
}

}  // namespace specdec::cpu
