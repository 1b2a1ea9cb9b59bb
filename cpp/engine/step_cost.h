// T(rows, context): what one forward pass costs as a function of the number of rows and of the
// tokens in the K/V cache, measured on this model and this machine. The one text of this law:
// Python's drafters use it as _core.StepCost.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.h"

namespace specdec {

// How rows of prompts compare with the table, which was measured on rows that decode: what more of
// them cost, and what the text costs that they read.
struct PrefillScale {
  double rows = 1.0, context = 1.0;
};

class StepCost {
 public:
  StepCost() = default;
  StepCost(std::vector<int> rows, std::vector<double> seconds, double context_len = 0.0,
           std::vector<double> growth = {}, const PrefillScale& prefill = {}) {
    set(std::move(rows), std::move(seconds), context_len, std::move(growth), prefill);
  }

  // `rows` ascending from 1; `seconds` positive. Between points: linear; beyond: the slope over the
  // last four points, because that of one pair may be noise.
  // `seconds` hold for one request with `context_len` tokens in the cache; `growth`: what each
  // token more adds, by rows again (empty: nothing).
  void set(std::vector<int> rows, std::vector<double> seconds, double context_len = 0.0,
           std::vector<double> growth = {}, const PrefillScale& prefill = {}) {
    SPECDEC_REQUIRE(rows.size() == seconds.size() && rows.size() >= 2, "step_cost: ", rows.size(),
                    " row counts and ", seconds.size(), " times: give at least two of each");
    SPECDEC_REQUIRE(growth.empty() || growth.size() == rows.size(), "step_cost.growth has ",
                    growth.size(), " entries, rows has ", rows.size(), ": give as many or none");
    SPECDEC_REQUIRE(context_len >= 0.0 && context_len <= kMost,
                    "step_cost.context_len = ", context_len, ": must be in 0..", kMost);
    SPECDEC_REQUIRE(rows.front() == 1, "step_cost.rows[0] = ", rows.front(), ": must be 1");
    for (std::size_t i = 0; i < rows.size(); ++i) {
      SPECDEC_REQUIRE(seconds[i] > 0.0 && seconds[i] <= kMost, "step_cost.seconds[", i,
                      "] = ", seconds[i], ": must be positive and at most ", kMost);
      SPECDEC_REQUIRE(i == 0 || rows[i] > rows[i - 1], "step_cost.rows[", i, "] = ", rows[i],
                      ": must ascend");
      SPECDEC_REQUIRE(growth.empty() || (growth[i] >= -kMost && growth[i] <= kMost),
                      "step_cost.growth[", i, "] = ", growth.empty() ? 0.0 : growth[i],
                      ": must be a number of at most ", kMost);
      // Noise can make a longer context look cheaper; the truth is monotone.
      if (!growth.empty()) growth[i] = std::max(growth[i], i > 0 ? growth[i - 1] : 0.0);
    }
    // The same of rows. What else a machine does makes passes slower, never faster: of two times in
    // the wrong order the longer one is wrong. Were it believed, the rows in between would look
    // free.
    for (std::size_t i = seconds.size() - 1; i > 0; --i) {
      seconds[i - 1] = std::min(seconds[i - 1], seconds[i]);
    }
    for (const double factor : {prefill.rows, prefill.context}) {
      SPECDEC_REQUIRE(factor > 0.0 && factor <= kMost, "step_cost.prefill = ", prefill.rows, ", ",
                      prefill.context, ": must be positive and at most ", kMost);
    }
    prefill_ = prefill;
    rows_ = std::move(rows);
    seconds_ = std::move(seconds);
    context_len_ = context_len;
    growth_ = std::move(growth);
  }

  // Writes T(rows) of a step with `requests` decoding requests that have `context_len` tokens in
  // the cache each, on average: their rows share the weights, but each reads its own cache. Shorter
  // contexts than the measured one count as that.
  void at(int requests, double context_len, StepCost* out) const {
    out->rows_ = rows_;
    out->seconds_ = seconds_;
    out->growth_.clear();
    const double more = context_len - context_len_;
    if (growth_.empty() || requests <= 0 || more <= 0.0) return;
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const double share = static_cast<double>(rows_[i]) / requests;
      out->seconds_[i] += requests * more * between(growth_, share);
    }
  }

  const PrefillScale& prefill_scale() const { return prefill_; }

  // Seconds that `rows` rows of a prompt add to a pass of `base` rows, as rows and by what each of
  // them reads. `start` tokens of the prompt were read before.
  double prefill(double base, double rows, double start) const {
    return prefill_.rows * more_rows(base, rows) + prefill_.context * more_context(rows, start);
  }
  double more_rows(double base, double rows) const { return (*this)(base + rows) - (*this)(base); }
  double more_context(double rows, double start) const {
    return std::max(0.0, start + rows / 2.0 - context_len_) * growth_at(rows);
  }

  // Seconds that reading tokens start, ..., end - 1 of a text takes in passes of their own, `chunk`
  // rows each at most.
  double read(double start, double end, int chunk) const {
    double seconds = 0.0;
    for (; start < end; start += chunk) {
      const double rows = std::min<double>(chunk, end - start);
      seconds += prefill_.rows * (*this)(rows) + prefill_.context * more_context(rows, start);
    }
    return seconds;
  }

  bool known() const { return !rows_.empty(); }
  const std::vector<int>& rows() const { return rows_; }
  const std::vector<double>& seconds() const { return seconds_; }
  const std::vector<double>& growth() const { return growth_; }
  double context_len() const { return context_len_; }

  double operator()(double rows) const { return between(seconds_, rows); }

  // What each token of context more adds to a pass of one request.
  double growth_at(double rows) const { return growth_.empty() ? 0.0 : between(growth_, rows); }

 private:
  static constexpr double kMost = 1e9;  // what is more, or no number, was never measured
  static constexpr std::size_t kSlopePoints = 4;

  double between(const std::vector<double>& values, double rows) const {
    const auto next = std::lower_bound(rows_.begin(), rows_.end(), rows);
    const auto i = static_cast<std::size_t>(next - rows_.begin());
    if (i == 0) return values.front();
    const std::size_t last = std::min(i, rows_.size() - 1);
    std::size_t from = i - 1, base = i - 1;
    if (i == rows_.size()) {
      from = i - std::min(i, kSlopePoints);
      base = last;
    }
    const double slope = (values[last] - values[from]) / (rows_[last] - rows_[from]);
    return values[base] + slope * (rows - rows_[base]);
  }

  std::vector<int> rows_;
  std::vector<double> seconds_, growth_;  // by rows; seconds, seconds per token of context
  double context_len_ = 0.0;              // of seconds_
  PrefillScale prefill_;
};

}  // namespace specdec
