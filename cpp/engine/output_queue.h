// What the last steps delivered, kept until the caller plans another one.
//
// Ctrl-C can strike between the return of a C++ call and the caller's next act: what the call
// returned is lost then. So outputs stay here as well. Whoever plans a new step has taken them;
// whoever was interrupted asks for them again. Each output has a number, and numbers grow, so a
// caller that meets an output twice can tell. Used by one thread at a time, like plan().
#pragma once

#include <cstdint>
#include <vector>

#include "engine/request.h"

namespace specdec {

class OutputQueue {
 public:
  // Numbers the outputs of a step, keeps them and hands them on.
  std::vector<StepOutput> keep(std::vector<StepOutput> outputs) {
    for (StepOutput& out : outputs) out.sequence = ++last_;
    kept_.insert(kept_.end(), outputs.begin(), outputs.end());
    return outputs;
  }

  // The caller has them.
  void clear() { kept_.clear(); }

  const std::vector<StepOutput>& kept() const { return kept_; }

 private:
  std::vector<StepOutput> kept_;
  std::int64_t last_ = 0;
};

}  // namespace specdec
