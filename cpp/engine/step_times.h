// T(rows, context) refined by the steps that are served anyway.
//
// It starts from a table (remembered, or guessed from bytes and rows) and keeps, for each row count
// of it, how the last steps compared with it. The lower quartile of these is believed: whatever
// else the machine does makes a step slower, never faster. What was not seen moves with what was.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/step_cost.h"
#include "engine/step_plan.h"

namespace specdec {

class StepTimes {
 public:
  explicit StepTimes(StepCost start);

  // A forward pass of `seconds` was served. Steps that read prompts say nothing and are ignored:
  // few of their rows need scores. True: cost() has changed.
  bool observe(const StepPlan& plan, double seconds);
  bool observe(int rows, int requests, double context_len, double seconds);

  const StepCost& cost() const { return cost_; }
  std::int64_t observed() const { return observed_; }

 private:
  // The last of some quotients "seen over expected".
  struct Recent {
    std::vector<float> values;
    std::size_t next = 0;
    void add(double value);
    bool known() const;
    double quartile() const;
  };
  void update();

  StepCost start_, cost_;
  std::vector<Recent> by_rows_;  // of start_.rows(): seconds
  Recent growth_;                // what a longer context adds
  std::int64_t observed_ = 0;
};

}  // namespace specdec
