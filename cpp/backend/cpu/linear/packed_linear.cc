#include "backend/cpu/linear/packed_linear.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "backend/cpu/linear/linear_kernels.h"
#include "backend/cpu/linear/quant_kernels.h"
#include "base/cpu_features.h"

namespace specdec::cpu {
namespace {

constexpr int kColumns = kPanelColumns;
static_assert(kChainSteps % (kScaledGroup / 2) == 0);
// Many rows of x on quantised weights: a block of panels stays in the second-level cache while
// tiles of few rows (QuantKernels::prefill_rows) pass over it.
constexpr std::int64_t kPanelBlockBytes = 256 * 1024;
// From so many rows on, widening weights of 4 and of 8 bits for tiles saves time
// (benchmarks/linear_rows.py --fast).
constexpr std::int64_t kWidenedRows4 = 16, kWidenedRows8 = 20;
// Elements of what is widened at a time.
constexpr std::int64_t kMostWide = kMostCutSteps / kWideGroupSteps * kWideGroup;
static_assert(kMostWide >= kScaledCodes && kMostCutSteps % kWideGroupSteps == 0);
// How far ahead a thread fetches that only reads: where that is fastest (linear_kernels.h has the
// distances of products).
constexpr std::int64_t kReadAheadBytes = 8192;
// What one thread reads and multiplies in a nanosecond, roughly: sizes of parts follow from it.
constexpr std::int64_t kBytesPerNs = 16;
constexpr std::int64_t kMultiplyAddsPerNs = 100;
// Panels of a part at least, for many rows on quantised weights.
constexpr std::int64_t kPrefillPanels = 4;

// y[kColumns] times a row's scale, and the bias if there is one.
void scale_row(const std::byte* scale_bytes, const float* bias, float* y) {
  float scale;
  std::memcpy(&scale, scale_bytes, sizeof(scale));
  for (int c = 0; c < kColumns; ++c) y[c] *= scale;
  for (int c = 0; bias != nullptr && c < kColumns; ++c) y[c] += bias[c];
}

}  // namespace

std::int64_t input_offset(InputForm form, std::int64_t k) {
  switch (form) {
    case InputForm::kBF16:
    case InputForm::kE4M3:
      return (k + 1) / 2 * 4;
    case InputForm::kQuant:
      return (k + kGroup - 1) / kGroup * static_cast<std::int64_t>(2 * sizeof(QuantBlock));
    default:
      return k * 4;
  }
}

std::int64_t input_row_bytes(InputForm form, std::int64_t k) {
  const std::int64_t scale = form == InputForm::kE4M3 ? sizeof(float) : 0;
  return input_offset(form, k) + scale;
}

std::int64_t WeightView::columns() const {
  const BlockSize size = block_size(type);
  if (!is_block_format(type)) return view.shape[1];
  return view.shape[1] % size.bytes == 0 ? view.shape[1] / size.bytes * size.elements : -1;
}

std::int64_t PackedLinear::many_rows() const {
  if (!is_quantised(type_) || kernels_->widen_groups == nullptr) return 0;
  return quant_format(type_).nibbles ? kWidenedRows4 : kWidenedRows8;
}

InputForm PackedLinear::fast_form(std::int64_t rows) const {
  const std::int64_t many = many_rows();
  return many > 0 && rows >= many ? InputForm::kBF16 : input_form();
}

PackedLinear::~PackedLinear() = default;
PackedLinear::PackedLinear(PackedLinear&&) noexcept = default;
PackedLinear& PackedLinear::operator=(PackedLinear&&) noexcept = default;

// Calls sink(panel, first_row, num_rows, run) for every tile of a part, where run(y, y_stride)
// computes one stretch of the tile's chains and adds it to y (the first one replaces y).
template <typename Sink>
void PackedLinear::for_each_tile(const InputRows& input, int part, int parts, Sink&& sink) const {
  if (input.form == InputForm::kQuant) {
    for_each_quant_tile(input, part, parts, sink);
    return;
  }
  const auto* x = static_cast<const std::byte*>(input.data);
  const std::int64_t x_row_bytes = input.row_bytes, rows = input.rows;
  // Quantised groups become steps of bf16, a cut at a time.
  const WidenGroupsFn widen_groups = is_quantised(type_) ? kernels_->widen_groups(type_) : nullptr;
  const bool is_widened = widen_groups != nullptr;
  const std::int64_t steps = is_widened ? steps_ * kWideGroupSteps : steps_;
  const Range panels = share(panels_, part, parts);
  const bool scaled = is_e4m3(type_);
  const bool has_own_tile = rows == 1 && kernels_->e4m3[1] != nullptr;
  const bool widens = scaled && kernels_->widen != nullptr && !has_own_tile;
  const bool has_row_scales = type_ == WeightType::kF8A8;
  const TileFn* table = type_ == WeightType::kF32   ? kernels_->f32
                        : type_ == WeightType::kF16 ? kernels_->f16
                        : scaled && !widens         ? kernels_->e4m3
                                                    : kernels_->bf16;
  const bool is_bf16 = table == kernels_->bf16;
  const std::int64_t max_rows = is_bf16 ? kernels_->bf16_rows : kernels_->max_rows;
  const std::int64_t step_bytes = panel_bytes_ / steps_;  // as they are packed
  const std::int64_t chain = is_bf16 ? kernels_->bf16_chain : kChainSteps;
  const std::int64_t ahead = rows == 1 ? kOneRowPrefetchBytes
                             : is_bf16 ? kernels_->bf16_ahead
                                       : kPrefetchBytes;
  const std::int64_t stretch = widens ? kScaledGroup / 2 : chain;
  const bool cuts =
      is_widened || (is_bf16 && !widens && kernels_->cut_steps != 0 && rows > max_rows);
  const std::int64_t block_rows = cuts ? kCarriedRows : rows;
  alignas(64) std::uint16_t wide[kMostWide];
  alignas(64) float carry[kCarriedRows * kColumns];
  int configured_rows = 0;
  TileArgs args;
  args.x_row_bytes = x_row_bytes;
  args.configured_rows = &configured_rows;

  // Steps [step, step + count) of a panel, at args.panel, for a block of rows.
  const auto run_stretch = [&](std::int64_t panel, Range block, std::int64_t step,
                               std::int64_t count) {
    const bool last_block = step + count == steps;
    const float* bias = last_block && !bias_.empty() ? bias_.data() + panel * kColumns : nullptr;
    args.bias = has_row_scales ? nullptr : bias;
    args.resume = step != 0;
    const std::int64_t size = block.end - block.begin;
    const std::int64_t tiles = (size + max_rows - 1) / max_rows;
    const std::int64_t cut = cuts && (tiles > 1 || is_widened) ? kernels_->cut_steps : count;
    for (std::int64_t done = 0; done < count; done += cut) {
      args.steps = std::min(cut, count - done);
      args.carried_in = done != 0;
      args.carries_on = done + args.steps < count;
      if (is_widened) {
        const std::int64_t group = (step + done) / kWideGroupSteps;
        const std::byte* groups = packed_ + panel * panel_bytes_ + group * step_bytes;
        widen_groups(groups, args.steps / kWideGroupSteps, wide, groups + kPrefetchBytes);
        args.panel = reinterpret_cast<const std::byte*>(wide);
      }
      for (std::int64_t tile = 0; tile < tiles; ++tile) {
        const std::int64_t offset = size * tile / tiles, row = block.begin + offset;
        const int height = static_cast<int>(size * (tile + 1) / tiles - offset);
        args.x = x + row * x_row_bytes + (step + done) * 4;
        args.carry = carry + offset * kColumns;
        // The last of several tiles reads the panel from the cache, so it fetches what follows.
        const bool fetch_next = tiles > 1 && tile + 1 == tiles;
        args.prefetch = args.panel + (fetch_next ? args.steps * step_bytes : ahead);
        if (widens || is_widened) args.prefetch = args.panel;  // what widens them has fetched
        if (args.carries_on) {
          table[height](args);
          continue;
        }
        sink(panel, row, height, last_block, [&](float* y, std::int64_t y_stride) {
          args.y = y;
          args.y_stride = y_stride;
          table[height](args);
          if (!has_row_scales || !last_block) return;
          const std::byte* scale = x + row * x_row_bytes + input_offset(InputForm::kE4M3, k_);
          for (int m = 0; m < height; ++m, scale += x_row_bytes) {
            scale_row(scale, bias, y + m * y_stride);
          }
        });
      }
      if (!is_widened) args.panel += args.steps * step_bytes;
    }
  };

  for (std::int64_t panel = panels.begin; panel < panels.end; ++panel) {
    for (std::int64_t first = 0; first < rows; first += block_rows) {
      const Range block{first, std::min(first + block_rows, rows)};
      for (std::int64_t step = 0; step < steps; step += stretch) {
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
        run_stretch(panel, block, step, std::min(stretch, steps - step));
      }
    }
  }
  if (configured_rows != 0) kernels_->leave();
}

// The same for quantised weights: a tile is a whole panel, its stretches of k are done in one go.
// Row tiles pass over a block of panels before the next block is read.
template <typename Sink>
void PackedLinear::for_each_quant_tile(const InputRows& input, int part, int parts,
                                       Sink&& sink) const {
  const auto* x = static_cast<const std::byte*>(input.data);
  const std::int64_t x_row_bytes = input.row_bytes, rows = input.rows;
  const QuantTileFn compute = quant_kernels_->of(type_);
  const std::int64_t most = rows <= kQuantTileRows ? kQuantTileRows : quant_kernels_->prefill_rows;
  const std::int64_t tiles = (rows + most - 1) / most;
  // Nibbles take as long to unpack for one row as two rows of bytes take to be multiplied.
  const bool reads_quickly = rows == 1 && !quant_format(type_).nibbles;
  const Range panels = share(panels_, part, parts);
  const std::int64_t block = std::max<std::int64_t>(1, kPanelBlockBytes / panel_bytes_);
  for (std::int64_t begin = panels.begin; begin < panels.end; begin += block) {
    const std::int64_t end = std::min(begin + block, panels.end);
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t row = rows * tile / tiles;
      QuantTileArgs args;
      args.x = x + row * x_row_bytes;
      args.x_row_bytes = x_row_bytes;
      args.rows = static_cast<int>(rows * (tile + 1) / tiles - row);
      args.steps = steps_;
      if (tiles > 1) args.pass_rows = quant_kernels_->prefill_pass_rows;
      // The last of several tiles reads panels that are near, so it fetches the next block's.
      const bool fetch_next = tiles > 1 && tile + 1 == tiles;
      const std::int64_t ahead = fetch_next      ? (end - begin) * panel_bytes_
                                 : reads_quickly ? kOneRowPrefetchBytes
                                                 : kPrefetchBytes;
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

int PackedLinear::num_parts(std::int64_t rows, int matrices) const {
  const std::int64_t multiply_adds = rows * k_ * kColumns;
  std::int64_t ns = std::max(panel_bytes_ / kBytesPerNs, multiply_adds / kMultiplyAddsPerNs);
  std::int64_t panels = panels_;
  if (is_quantised(type_) && rows > kQuantTileRows) {
    // A part passes over all rows of x: not for a few panels.
    panels = std::max<std::int64_t>(1, panels / kPrefillPanels);
    ns *= kPrefillPanels;
  }
  return ThreadPool::global().pieces(panels, ns * matrices);
}

// Only where a pass waits for memory. Part of the second-level cache: the rest has what is used.
void PackedLinear::expect(std::int64_t rows, const PackedLinear* other) const {
  static const std::int64_t most = second_level_cache_bytes() / 4;
  if (rows > kQuantTileRows) return;
  ThreadPool& pool = ThreadPool::global();
  const int matrices = other == nullptr ? 1 : 2, size = pool.size();
  const int parts = num_parts(rows, matrices);
  for (int rank = 0; rank < size; ++rank) {
    const Range own = share(parts, rank, size);
    const std::int64_t first = share(panels_, own.begin, parts).begin;
    const std::int64_t last = share(panels_, own.end, parts).begin;
    const std::int64_t begin = first * panel_bytes_, bytes = last * panel_bytes_ - begin;
    const std::byte* others = other == nullptr ? packed_ : other->packed_;
    pool.expect_reads(rank, packed_ + begin, others + begin,
                      static_cast<std::size_t>(std::min(most / matrices, bytes)));
  }
}

void PackedLinear::run(const InputRows& x, float* y, std::int64_t y_stride) const {
  const int parts = num_parts(x.rows);
  ThreadPool::global().run(parts, [&](int part, int) {
    run_part(x, y + columns_of(part, parts).begin, y_stride, part, parts);
  });
}

void PackedLinear::run_part(const InputRows& x, float* y, std::int64_t y_stride, int part,
                            int parts) const {
  if (x.rows <= 0) return;
  const std::int64_t first_panel = share(panels_, part, parts).begin;
  for_each_tile(
      x, part, parts, [&](std::int64_t panel, std::int64_t row, int height, bool, auto&& compute) {
        float* out = y + row * y_stride + (panel - first_panel) * kColumns;
        const std::int64_t width = std::min<std::int64_t>(kColumns, n_ - panel * kColumns);
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

void PackedLinear::argmax_part(const InputRows& x, RowBest* best, int part, int parts) const {
  const std::int64_t rows = x.rows;
  std::fill_n(best, rows, RowBest{});
  // Scores of one panel for a slice of rows: all row tiles of the slice share one reading of it.
  constexpr std::int64_t kSliceRows = 120;
  alignas(64) float slice_scores[kSliceRows * kColumns];
  for (std::int64_t first = 0; first < rows; first += kSliceRows) {
    const std::int64_t slice = std::min(kSliceRows, rows - first);
    for_each_tile(
        x.part(first, slice), part, parts,
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

std::uint64_t PackedLinear::read() const {
  std::atomic<std::uint64_t> sum{0};
  const int parts = num_parts(1);
  ThreadPool::global().run(parts, [&](int part, int) { sum += read_part(part, parts); });
  return sum.load();
}

std::uint64_t PackedLinear::read_part(int part, int parts) const {
  // Panels are whole cache lines of 8 words; independent sums, so that only memory is waited for.
  const auto* words = reinterpret_cast<const std::uint64_t*>(packed_);
  const Range panels = share(panels_, part, parts);
  const std::int64_t begin = panels.begin * panel_bytes_ / 8, end = panels.end * panel_bytes_ / 8;
  std::uint64_t sums[8] = {};
  for (std::int64_t i = begin; i < end; i += 8) {
    __builtin_prefetch(words + i + kReadAheadBytes / 8);
    for (int j = 0; j < 8; ++j) sums[j] += words[i + j];
  }
  std::uint64_t total = 0;
  for (std::uint64_t sum : sums) total += sum;
  return total;
}

void merge_best(const RowBest* found, int parts, std::int64_t rows, RowBest* merged) {
  for (std::int64_t row = 0; row < rows; ++row) {
    RowBest best;
    for (int i = 0; i < parts && best.index != RowBest::kNaN; ++i) {
      const RowBest& part = found[i * rows + row];
      if (part.index == RowBest::kNone) continue;
      if (part.index == RowBest::kNaN || best.index == RowBest::kNone || part.value > best.value) {
        best = part;
      }
    }
    merged[row] = best;
  }
}

}  // namespace specdec::cpu
