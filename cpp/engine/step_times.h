// T(rows, context) refined by the steps that are served anyway.
//
// It starts from a table (remembered, or guessed from bytes and rows) and keeps, for each row count
// of it, how the last steps compared with it. The lower quartile of these is believed: whatever
// else the machine does makes a step slower, never faster. What was not seen moves with what was.
// Rows that look dear are not drafted, and so not seen. If they looked so on a busy machine, in
// this process or the one that remembered the table, nothing would ever correct it. So what was not
// seen for long, and is dearer set against the guess than the rows that are served, is the guess's
// again.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/step_cost.h"
#include "engine/step_plan.h"

namespace specdec {

class StepTimes {
 public:
  // `guess`: what nothing was measured for, of as much as `start`; without it `start` itself.
  explicit StepTimes(StepCost start) : StepTimes(start, start) {}
  StepTimes(StepCost start, StepCost guess);

  // A forward pass of `seconds` was served. True: cost() has changed. A step that reads prompts
  // teaches what these add, and nothing about rows that decode: few of its rows need scores.
  bool observe(const StepPlan& plan, double seconds);
  bool observe(int rows, int requests, double context_len, double seconds);

  const StepCost& cost() const { return cost_; }
  std::int64_t observed() const { return observed_; }

 private:
  // The last of some quotients "seen over expected".
  struct Recent {
    std::vector<float> values;
    std::size_t next = 0;
    std::int64_t last = 0;  // StepTimes::observed() when the last one came
    void add(double value);
    bool known() const;
    double quartile() const;
  };
  bool observe_prefill(const StepPlan& plan, double seconds);
  void forget_stale();
  void update();

  StepCost start_, guess_, cost_;
  std::vector<Recent> by_rows_;  // of start_.rows(): seconds
  Recent growth_;                // what a longer context adds
  // What rows of prompts add, and the text that they read: the first of each is believed, because
  // a prompt may be read in a few steps.
  Recent prefill_rows_, prefill_context_;
  std::int64_t observed_ = 0;
};

}  // namespace specdec
