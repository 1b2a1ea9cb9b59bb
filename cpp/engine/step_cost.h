// T(rows): what one forward pass costs as a function of the number of rows, measured on this model
// and this machine, and what it says about a draft's worth.
#pragma once

#include <algorithm>
#include <vector>

#include "base/check.h"

namespace specdec {

class StepCost {
 public:
  // `rows` ascending from 1; `seconds` positive. Between points: linear; beyond: the last slope.
  void set(std::vector<int> rows, std::vector<double> seconds) {
    SPECDEC_REQUIRE(rows.size() == seconds.size() && rows.size() >= 2, "step_cost: ", rows.size(),
                    " row counts and ", seconds.size(), " times: give at least two of each");
    SPECDEC_REQUIRE(rows.front() == 1, "step_cost.rows[0] = ", rows.front(), ": must be 1");
    for (std::size_t i = 0; i < rows.size(); ++i) {
      SPECDEC_REQUIRE(seconds[i] > 0.0, "step_cost.seconds[", i, "] = ", seconds[i],
                      ": must be positive");
      SPECDEC_REQUIRE(i == 0 || rows[i] > rows[i - 1], "step_cost.rows[", i, "] = ", rows[i],
                      ": must ascend");
      // Noise can make more rows look cheaper; the truth is monotone.
      if (i > 0) seconds[i] = std::max(seconds[i], seconds[i - 1]);
    }
    rows_ = std::move(rows);
    seconds_ = std::move(seconds);
  }

  bool known() const { return !rows_.empty(); }
  const std::vector<int>& rows() const { return rows_; }
  const std::vector<double>& seconds() const { return seconds_; }

  double operator()(int rows) const {
    const auto next = std::lower_bound(rows_.begin(), rows_.end(), rows);
    std::size_t i = static_cast<std::size_t>(next - rows_.begin());
    if (i == 0) return seconds_.front();
    i = std::min(i, rows_.size() - 1);
    const double slope =
        (seconds_[i] - seconds_[i - 1]) / static_cast<double>(rows_[i] - rows_[i - 1]);
    return seconds_[i - 1] + slope * static_cast<double>(rows - rows_[i - 1]);
  }

 private:
  std::vector<int> rows_;
  std::vector<double> seconds_;
};

}  // namespace specdec
