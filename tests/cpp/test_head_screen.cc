// HeadScreen: value and column are those of the head itself, whatever numbers it holds.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "backend/cpu/decoder/head_screen.h"
#include "backend/cpu/decoder/input_rows.h"
#include "backend/cpu/half.h"
#include "check.h"

namespace specdec::cpu {
namespace head_screen_test {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A weight [n, k] of floats, stored in one of the three types.
struct Matrix {
  std::int64_t n, k;
  DType dtype;
  std::vector<float> values;
  std::vector<std::uint16_t> halves;

  Matrix(std::int64_t n_, std::int64_t k_, DType dtype_)
      : n(n_), k(k_), dtype(dtype_), values(static_cast<std::size_t>(n_ * k_)) {}
  float& at(std::int64_t row, std::int64_t column) { return values[row * k + column]; }

  PackedLinear pack() {
    TensorView view;
    view.ndim = 2;
    view.shape[0] = n;
    view.shape[1] = k;
    view.strides[0] = k;
    view.strides[1] = 1;
    view.dtype = dtype;
    view.data = values.data();
    if (dtype != DType::kF32) {
      halves.resize(values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        halves[i] = dtype == DType::kBF16 ? float_to_bf16(values[i]) : float_to_f16(values[i]);
      }
      view.data = halves.data();
    }
    return PackedLinear(std::vector<WeightView>{view});
  }
};

Matrix random_matrix(std::int64_t n, std::int64_t k, DType dtype, std::mt19937& random) {
  Matrix matrix(n, k, dtype);
  std::normal_distribution<float> normal(0.0f, 0.1f);
  for (float& value : matrix.values) value = normal(random);
  return matrix;
}

// Rows of x as `head` takes them.
struct Rows {
  std::vector<std::byte> bytes;
  InputRows view;

  Rows(const PackedLinear& head, const std::vector<float>& x) {
    const std::int64_t k = head.k(), rows = static_cast<std::int64_t>(x.size()) / k;
    const std::int64_t row_bytes = input_row_bytes(head.input_form(), k) + 64;
    bytes.resize(static_cast<std::size_t>(rows * row_bytes));
    for (std::int64_t r = 0; r < rows; ++r) {
      convert_row(row_ops(), head.input_form(), x.data() + r * k, k, bytes.data() + r * row_bytes);
    }
    view = {bytes.data(), row_bytes, rows, head.input_form()};
  }
};

std::vector<float> random_rows(std::int64_t rows, std::int64_t k, std::mt19937& random) {
  std::vector<float> x(static_cast<std::size_t>(rows * k));
  std::normal_distribution<float> normal;
  for (float& value : x) value = normal(random);
  return x;
}

std::vector<RowBest> whole(const PackedLinear& head, const InputRows& x) {
  std::vector<RowBest> found(static_cast<std::size_t>(x.rows)), best(found.size());
  head.argmax_part(x, found.data(), 0, 1);
  merge_best(found.data(), 1, x.rows, best.data());
  return best;
}

// Where there is a NaN, no value is asked for.
bool equal(const RowBest& a, const RowBest& b) {
  if (a.index == RowBest::kNaN) return b.index == RowBest::kNaN;
  return a.index == b.index && std::memcmp(&a.value, &b.value, sizeof(float)) == 0;
}

// Rows of x with this screen: what it finds is what the whole head has. Returns whether it found.
bool check_rows(HeadScreen& screen, const PackedLinear& head, const std::vector<float>& x) {
  const Rows rows(head, x);
  const std::vector<RowBest> wanted = whole(head, rows.view);
  std::vector<RowBest> best(wanted.size(), RowBest{-7.0f, -77});
  const bool found = screen.find(rows.view, best.data());
  for (std::size_t r = 0; r < best.size(); ++r) {
    CHECK(equal(best[r], found ? wanted[r] : RowBest{-7.0f, -77}));
  }
  return found;
}

constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

// x near one of the columns, as in a model that knows what comes next.
std::vector<float> near_columns(Matrix& matrix, const std::vector<std::int64_t>& columns,
                                float noise, std::mt19937& random) {
  std::vector<float> x = random_rows(static_cast<std::int64_t>(columns.size()), matrix.k, random);
  for (std::size_t r = 0; r < columns.size(); ++r) {
    for (std::int64_t i = 0; i < matrix.k; ++i) {
      float& value = x[r * matrix.k + i];
      value = noise * value + matrix.at(columns[r], i);
    }
  }
  return x;
}

TEST(rows_of_all_numbers_are_those_of_the_head) {
  std::mt19937 random(1);
  for (const DType dtype : kTypes) {
    Matrix matrix = random_matrix(5003, 96, dtype, random);  // the last panel has 11 columns
    const PackedLinear head = matrix.pack();
    CHECK(HeadScreen::serves(head));
    HeadScreen screen(head);
    for (const std::int64_t rows : {1, 2, 7, 33, 70}) {
      std::vector<std::int64_t> columns;
      for (std::int64_t r = 0; r < rows; ++r) {
        columns.push_back(r == 0 ? 5002 : static_cast<std::int64_t>(random() % 5003));
      }
      const bool found = check_rows(screen, head, near_columns(matrix, columns, 0.01f, random));
      CHECK(found || rows > 12);  // with tiles only few rows
      if (found) CHECK(screen.panels_left() < 3 * rows);
    }
  }
}

// Columns whose scores differ by less than the copy can tell, and equal ones: the head decides.
TEST(near_ties_are_the_heads) {
  std::mt19937 random(2);
  int told_wrongly = 0;
  for (const DType dtype : kTypes) {
    Matrix matrix = random_matrix(4096 + 32, 64, dtype, random);
    const std::int64_t rivals[] = {17, 801, 2400, 4127};
    for (const std::int64_t rival : rivals) {
      for (std::int64_t i = 0; i < matrix.k; ++i) {
        const float step = static_cast<float>(static_cast<int>(random() % 3) - 1);
        matrix.at(rival, i) = (matrix.at(17, i) + 0.004f * step) * (rival == 17 ? 4.0f : 1.0f);
      }
    }
    for (std::int64_t i = 0; i < matrix.k; ++i) matrix.at(3000, i) = matrix.at(801, i);
    const PackedLinear head = matrix.pack();
    HeadScreen screen(head);
    Matrix copy(matrix.n, matrix.k, DType::kF32);
    for (int turn = 0; turn < 40; ++turn) {
      const std::vector<float> x = near_columns(matrix, {17}, 0.002f, random);
      CHECK(check_rows(screen, head, x));
      // A copy alone, without bounds, would be wrong now and then: count that it would.
      const Rows rows(head, x);
      const std::int32_t best = whole(head, rows.view)[0].index;
      double most = -1e30;
      std::int64_t at = -1;
      for (const std::int64_t rival : rivals) {
        double score = 0.0;
        for (std::int64_t i = 0; i < matrix.k; i += 32) {
          float size = 0.0f;
          for (int j = 0; j < 32; ++j) size = std::max(size, std::fabs(matrix.at(rival, i + j)));
          const float scale = size / 127.0f;
          for (int j = 0; j < 32; ++j) {
            score += static_cast<double>(std::nearbyint(matrix.at(rival, i + j) / scale)) * scale *
                     x[i + j];
          }
        }
        if (score > most) {
          most = score;
          at = rival;
        }
      }
      told_wrongly += at != best ? 1 : 0;
    }
  }
  CHECK(told_wrongly > 0);
}

TEST(columns_that_hold_no_numbers) {
  std::mt19937 random(3);
  const float strange[] = {std::nanf(""), -std::nanf(""), kInfinity, -kInfinity, 3e38f,
                           -3e38f,        1e30f,          65504.0f,  1e-40f,     0.0f};
  for (const DType dtype : kTypes) {
    for (const float value : strange) {
      Matrix matrix = random_matrix(4200, 64, dtype, random);
      for (std::int64_t i = 0; i < matrix.k; i += 5) matrix.at(1234, i) = value;
      for (std::int64_t i = 0; i < matrix.k; ++i) matrix.at(77, i) = value;
      const PackedLinear head = matrix.pack();
      HeadScreen screen(head);
      check_rows(screen, head, near_columns(matrix, {40, 4199, 1235}, 0.02f, random));
      check_rows(screen, head, std::vector<float>(static_cast<std::size_t>(matrix.k), 0.0f));
    }
  }
}

TEST(rows_that_hold_no_numbers_are_left_to_the_head) {
  std::mt19937 random(4);
  Matrix matrix = random_matrix(4200, 64, DType::kBF16, random);
  const PackedLinear head = matrix.pack();
  for (const float value : {std::nanf(""), kInfinity, -kInfinity, 1e20f}) {
    HeadScreen screen(head);
    std::vector<float> x = near_columns(matrix, {5, 6, 7}, 0.02f, random);
    x[64 + 3] = value;
    CHECK(!check_rows(screen, head, x));
    // And the next ones are not.
    x[64 + 3] = 0.1f;
    bool found = false;
    for (int turn = 0; turn < 3 && !found; ++turn) found = check_rows(screen, head, x);
    CHECK(found);
  }
}

// Rows of numbers that the copy cannot tell apart: the head does, after ever fewer tries.
TEST(tries_become_rare_where_they_fail) {
  std::mt19937 random(5);
  Matrix matrix(4200, 64, DType::kF32);
  std::normal_distribution<float> normal(0.0f, 1e-5f);
  for (std::int64_t n = 0; n < matrix.n; ++n) {
    for (std::int64_t i = 0; i < matrix.k; ++i) matrix.at(n, i) = 1.0f + normal(random);
  }
  const PackedLinear head = matrix.pack();
  HeadScreen screen(head);
  const std::vector<float> x = random_rows(1, matrix.k, random);
  for (int turn = 0; turn < 50; ++turn) CHECK(!check_rows(screen, head, x));
  CHECK_EQ(screen.tries(), 6);  // after pauses of 1, 2, 4, 8, 16 passes
}

TEST(heads_that_are_not_worth_a_copy) {
  std::mt19937 random(6);
  CHECK(!HeadScreen::serves(random_matrix(4095, 64, DType::kBF16, random).pack()));
  CHECK(!HeadScreen::serves(random_matrix(4200, 72, DType::kBF16, random).pack()));
  CHECK(HeadScreen::serves(random_matrix(4096, 64, DType::kF16, random).pack()));
}

}  // namespace head_screen_test
}  // namespace specdec::cpu
