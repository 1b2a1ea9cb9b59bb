#include "backend/cpu/decoder/head_screen.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cpu/decoder/input_rows.h"
#include "backend/cpu/half.h"
#include "backend/cpu/linear/linear_kernels.h"
#include "backend/cpu/linear/quant_pack.h"
#include "backend/cpu/linear/weight_memory.h"
#include "base/thread_pool.h"

namespace specdec::cpu {
namespace {

constexpr int kColumns = kPanelColumns;
constexpr WeightType kCopy = WeightType::kQ8_0;
constexpr int kZero = quant_format(kCopy).zero();
constexpr float kMostHalf = 65504.0f;
// Smaller heads are read in no time.
constexpr std::int64_t kLeastColumns = 4096;
// Tiles multiply many rows of bf16 faster than the copy's kernel those of 8 bits: as fast from 16
// on (Xeon with tiles, benchmarks/results/linear_rows-cpu2-2026-11-27-2fa534b.md).
constexpr std::int64_t kMostRowsBesideTiles = 12;
// Numbers up to this keep every sum finite, and what is lost of them below the normal range is far
// less than kTiny.
constexpr float kMostSize = 0x1p40f, kTiny = 0x1p-70f;
// Passes between two tries where panels are hard to tell apart, at most.
constexpr int kMostPause = 256;

// What rounding adds to both sums of k products, over |x| |w|: k + 1 roundings of the head's sum
// and two for each block of the copy's, twice that to be safe.
float rounding(std::int64_t k) {
  return static_cast<float>(static_cast<double>(k + k / 8 + 64) * 0x1p-23);
}

// As a float that is no smaller.
float rounded_up(double value) { return static_cast<float>(value * (1.0 + 0x1p-20)); }

// 32 elements in 8 bits; scale 0 where there is nothing to keep or one is not finite.
Group copy_group(const float* w) {
  float largest = 0.0f;
  bool is_finite = true;
  for (int i = 0; i < kGroup; ++i) {
    const float size = std::fabs(w[i]);
    is_finite = is_finite && std::isfinite(w[i]);
    largest = size > largest ? size : largest;
  }
  Group group{};
  const float wanted = is_finite ? std::min(largest / 127.0f, kMostHalf) : 0.0f;
  const float scale = f16_to_float(float_to_f16(wanted));
  group.scale[0] = group.scale[1] = scale;
  for (int i = 0; i < kGroup; ++i) {
    const float code = scale > 0.0f ? std::nearbyint(w[i] / scale) : 0.0f;
    group.codes[i] =
        static_cast<std::uint8_t>(static_cast<int>(std::clamp(code, -127.0f, 127.0f)) + kZero);
  }
  return group;
}

// The largest of a panel's scores of one row. Four chains: the compiler would make it one.
float largest(const float* scores) {
  typedef float Lanes __attribute__((vector_size(16)));
  Lanes best[2], more[2];
  std::memcpy(best, scores, sizeof(best));
  for (int c = 8; c < kColumns; c += 8) {
    std::memcpy(more, scores + c, sizeof(more));
    for (int i = 0; i < 2; ++i) best[i] = more[i] > best[i] ? more[i] : best[i];
  }
  best[0] = best[1] > best[0] ? best[1] : best[0];
  return std::max(std::max(best[0][0], best[0][1]), std::max(best[0][2], best[0][3]));
}

}  // namespace

bool HeadScreen::serves(const PackedLinear& head) {
  return !is_block_format(head.type()) && head.n() >= kLeastColumns && head.k() % kGroup == 0 &&
         head.view().bias == nullptr;
}

HeadScreen::HeadScreen(const PackedLinear& head)
    : head_(head),
      ops_(row_ops()),
      panels_((head.n() + kColumns - 1) / kColumns),
      bounds_(static_cast<std::size_t>(panels_)) {
  const std::int64_t bytes = packed_bytes(kCopy, head.n(), head.k());
  const auto block = WeightBlock::allocate(static_cast<std::size_t>(bytes));
  ThreadPool::global().run_items(panels_, head.k() * kColumns, [&](Range some, int) {
    for (std::int64_t panel = some.begin; panel < some.end; ++panel) {
      copy_panel(panel, block->data() + panel * (bytes / panels_));
    }
  });
  copy_ = std::make_unique<PackedLinear>(
      PackedView{kCopy, head.n(), head.k(), block->data(), nullptr, block});
}

void HeadScreen::copy_panel(std::int64_t panel, std::byte* to) {
  const std::int64_t k = head_.k();
  std::vector<float> column(static_cast<std::size_t>(k));
  double error = 0.0, size = 0.0;
  for (int c = 0; c < kColumns && panel * kColumns + c < head_.n(); ++c) {
    head_.unpack_row(panel * kColumns + c, column.data());
    double missed = 0.0, own = 0.0, copied = 0.0;  // sums of squares
    for (std::int64_t at = 0; at < k; at += kGroup) {
      const Group group = copy_group(column.data() + at);
      pack_group(kCopy, group, c, to + at / kGroup * quant_format(kCopy).step_bytes());
      for (int i = 0; i < kGroup; ++i) {
        const double w = column[at + i];
        const double v = static_cast<double>(group.scale[0]) * (group.codes[i] - kZero);
        missed += (w - v) * (w - v);
        own += w * w;
        copied += v * v;
      }
    }
    error = std::max(error, std::sqrt(missed));
    size = std::max({size, std::sqrt(own), std::sqrt(copied)});
    // A NaN is greater than nothing.
    if (std::isnan(own)) size = std::numeric_limits<double>::infinity();
  }
  bounds_[panel] = {rounded_up(error), rounded_up(size)};
}

// Row `row` of x in 8 bits, and what that misses of it.
void HeadScreen::round_row(const InputRows& x, std::int64_t row) {
  const std::int64_t k = head_.k();
  const auto* from = static_cast<const std::byte*>(x.data) + row * x.row_bytes;
  std::vector<float> wide(static_cast<std::size_t>(k));
  if (x.form == InputForm::kBF16) {
    ops_.bf16_to_f32(reinterpret_cast<const std::uint16_t*>(from), k, wide.data());
  } else {
    std::memcpy(wide.data(), from, k * sizeof(float));
  }
  QuantBlock* blocks = rounded_.data() + row * (k / kGroup * 2);
  convert_row(ops_, InputForm::kQuant, wide.data(), k, reinterpret_cast<std::byte*>(blocks));
  double all = 0.0, missed = 0.0;  // sums of squares
  for (std::int64_t i = 0; i < k; ++i) {
    const QuantBlock* block = blocks + i / kGroup * 2;
    double kept = static_cast<double>(block->scale) * block->q[i % kGroup];
    if (block->has_rest != 0) {
      kept += static_cast<double>(block[1].scale) * block[1].q[i % kGroup];
    }
    const double value = wide[i];
    all += value * value;
    missed += (value - kept) * (value - kept);
  }
  const double size = std::sqrt(all), rest = std::sqrt(missed);
  sizes_[row] = {rounded_up(size), rounded_up(rest + rounding(k) * (size + rest))};
}

// What the best column of every panel may reach at most, and what some column of every part
// reaches for certain.
void HeadScreen::screen(std::int64_t rows, int parts) {
  const std::int64_t row_bytes =
      head_.k() / kGroup * static_cast<std::int64_t>(2 * sizeof(QuantBlock));
  const InputRows x{rounded_.data(), row_bytes, rows, InputForm::kQuant};
  ThreadPool::global().run(parts, [&](int part, int) {
    alignas(64) float tile[kMaxTileRows * kColumns];
    float* certain = certain_.data() + part * rows;
    std::fill_n(certain, rows, -std::numeric_limits<float>::infinity());
    const Range mine = share(panels_, part, parts);
    for (std::int64_t panel = mine.begin; panel < mine.end; ++panel) {
      const std::int64_t width = std::min<std::int64_t>(kColumns, head_.n() - panel * kColumns);
      for (std::int64_t first = 0; first < rows; first += kMaxTileRows) {
        const std::int64_t count = std::min<std::int64_t>(kMaxTileRows, rows - first);
        copy_->run_part(x.part(first, count), tile, kColumns, static_cast<int>(panel),
                        static_cast<int>(panels_));
        for (std::int64_t r = 0; r < count; ++r) {
          float* scores = tile + r * kColumns;
          for (std::int64_t c = width; c < kColumns; ++c) scores[c] = scores[0];
          const RowSize& size = sizes_[first + r];
          const float best = largest(scores), bound = size.all * bounds_[panel].error +
                                                      size.missed * bounds_[panel].size + kTiny;
          // No comparison is true of a bound that is no number.
          certain[first + r] = std::max(certain[first + r], best - bound);
          most_[(first + r) * panels_ + panel] = best + bound;
        }
      }
    }
  });
}

// Lists the panels that may hold a row's best column; false if there are too many.
bool HeadScreen::collect(std::int64_t rows, int parts) {
  // The copy and these panels together are to be clearly less than the head.
  const auto saved =
      static_cast<std::int64_t>(head_.bytes()) - static_cast<std::int64_t>(copy_->bytes());
  const std::int64_t limit = saved * panels_ / (2 * static_cast<std::int64_t>(head_.bytes()));
  std::int64_t read = 0;
  is_left_.assign(static_cast<std::size_t>(panels_), false);
  for (std::int64_t row = 0; row < rows; ++row) {
    float certain = -std::numeric_limits<float>::infinity();
    for (int part = 0; part < parts; ++part) {
      certain = std::max(certain, certain_[part * rows + row]);
    }
    const float* most = most_.data() + row * panels_;
    for (std::int64_t panel = 0; panel < panels_; ++panel) {
      if (most[panel] < certain) continue;
      if (!is_left_[panel] && ++read > limit) return false;
      is_left_[panel] = true;  // several rows share its reading
      left_.push_back({static_cast<std::int32_t>(row), static_cast<std::int32_t>(panel)});
    }
  }
  return true;
}

bool HeadScreen::find(const InputRows& x, RowBest* best) {
  left_.clear();
  const std::int64_t rows = x.rows;
  const bool has_tiles =
      head_.type() == WeightType::kBF16 && linear_kernels(cpu_isa()).leave != nullptr;
  if (has_tiles && rows > kMostRowsBesideTiles) return false;
  if (pause_ > 0) {
    --pause_;
    return false;
  }
  const auto count = static_cast<std::size_t>(rows);
  if (sizes_.size() < count) {
    sizes_.resize(count);
    rounded_.resize(count * static_cast<std::size_t>(head_.k() / kGroup * 2));
    most_.resize(count * static_cast<std::size_t>(panels_));
  }
  ThreadPool& pool = ThreadPool::global();
  pool.run_items(rows, head_.k(), [&](Range some, int) {
    for (std::int64_t row = some.begin; row < some.end; ++row) round_row(x, row);
  });
  for (std::int64_t row = 0; row < rows; ++row) {
    if (!(sizes_[row].all <= kMostSize)) return false;
  }
  const int parts = copy_->num_parts(rows);
  if (certain_.size() < count * static_cast<std::size_t>(parts)) {
    certain_.resize(count * static_cast<std::size_t>(parts));
  }
  ++tries_;
  screen(rows, parts);
  if (!collect(rows, parts)) {
    left_.clear();
    pause_ = next_pause_;
    next_pause_ = std::min(2 * next_pause_, kMostPause);
    return false;
  }
  next_pause_ = 1;

  found_.resize(left_.size());
  const std::int64_t read_ns = static_cast<std::int64_t>(head_.bytes()) / panels_ / 16;
  pool.run_items(static_cast<std::int64_t>(left_.size()), read_ns, [&](Range some, int) {
    for (std::int64_t i = some.begin; i < some.end; ++i) {
      head_.argmax_part(x.part(left_[i].row, 1), found_.data() + i, left_[i].panel,
                        static_cast<int>(panels_));
    }
  });
  for (std::size_t i = 0; i < left_.size();) {
    std::size_t end = i;
    while (end < left_.size() && left_[end].row == left_[i].row) ++end;
    merge_best(found_.data() + i, static_cast<int>(end - i), 1, best + left_[i].row);
    i = end;
  }
  return true;
}

}  // namespace specdec::cpu
