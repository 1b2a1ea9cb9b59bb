// The best column of a head of floats, read in 8 bits where that is enough to tell.
//
// A greedy step needs one number of the head's many thousand. So a copy of it in q8_0 is multiplied
// first, by rows rounded to 8 bits, and what that can miss of a score is bounded. With w a column,
// v its copy, x a row and z the row as it was rounded (Cauchy and Schwarz):
//   |x w - z v| <= |x| |w - v| + |x - z| |v|
// and both sums are rounded, by less than kRounding(k) |x| |w|. A panel of which no score of the
// copy comes within its bound of what some column reaches for certain holds no best column. The
// panels that are left, a few of a thousand in real text, are computed by the head itself. So value
// and column are its own, bit for bit, ties and all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "backend/cpu/decoder/row_ops.h"
#include "backend/cpu/linear/packed_linear.h"

namespace specdec::cpu {

class HeadScreen {
 public:
  // Whether a copy of this head would save anything: it is of floats, with many columns, and has no
  // bias.
  static bool serves(const PackedLinear& head);
  // Copies the head, which outlives this object, over ThreadPool::global(): 17/32 of its bytes in
  // 16 bits. Errors: std::bad_alloc.
  explicit HeadScreen(const PackedLinear& head);

  // best[rows] as argmax_part() and merge_best() of the head have it for all of its columns. False:
  // `best` is as it was, the head has to be read as a whole, because too many panels are left, a
  // number is not finite, or so many rows are no slower there. One call at a time.
  bool find(const InputRows& x, RowBest* best);

  // As PackedLinear::expect, of the copy.
  void expect(std::int64_t rows) const { copy_->expect(rows); }
  // Reads the copy and does nothing else (PackedLinear::read).
  std::uint64_t read() const { return copy_->read(); }
  std::size_t bytes() const { return copy_->bytes() + bounds_.size() * sizeof(Bound); }
  // Panels that the last find() computed exactly, and how often the copy was multiplied so far.
  std::int64_t panels_left() const { return static_cast<std::int64_t>(left_.size()); }
  std::int64_t tries() const { return tries_; }

 private:
  // What a panel's scores of the copy can miss: |x| error + (|x - z| + rounding) size.
  struct Bound {
    float error, size;  // the largest |w - v|, and |w| or |v|, of its columns
  };
  // The same of a row: |x|, and |x - z| + rounding.
  struct RowSize {
    float all, missed;
  };
  struct Left {
    std::int32_t row, panel;
  };

  void copy_panel(std::int64_t panel, std::byte* to);
  void round_row(const InputRows& x, std::int64_t row);
  void screen(std::int64_t rows, int parts);
  bool collect(std::int64_t rows, int parts);

  const PackedLinear& head_;
  const RowOps& ops_;
  std::int64_t panels_ = 0;
  std::unique_ptr<PackedLinear> copy_;
  std::vector<Bound> bounds_;  // [panels]
  // Passes that go by before the next try, and how many it will be if that fails, too.
  int pause_ = 0, next_pause_ = 1;
  std::int64_t tries_ = 0;
  // What one call works with.
  std::vector<QuantBlock> rounded_;  // [rows, k / 16]
  std::vector<RowSize> sizes_;       // [rows]
  std::vector<float> most_;          // [rows, panels]
  std::vector<float> certain_;       // [parts, rows]
  std::vector<Left> left_;           // row by row, panels ascending
  std::vector<bool> is_left_;        // [panels] of any row
  std::vector<RowBest> found_;       // [left_]
};

}  // namespace specdec::cpu
