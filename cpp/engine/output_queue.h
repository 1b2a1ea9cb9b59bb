// What the last steps delivered, kept until the caller plans another one.
//
// Ctrl-C can strike between the return of a C++ call and the caller's next act: what the call
// returned is lost then. So outputs stay here as well. Whoever plans a new step has taken them;
// whoever was interrupted asks for them again. Each output has a number, and numbers grow, so a
// caller that meets an output twice can tell. Used by one thread at a time, like plan().
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/request.h"

namespace specdec {

// Each is one object, whoever has it.
using Outputs = std::vector<std::shared_ptr<StepOutput>>;

class OutputQueue {
 public:
  // Numbers the outputs of a step, keeps them and hands them on.
  Outputs keep(std::vector<StepOutput> outputs) {
    const auto first = static_cast<std::ptrdiff_t>(kept_.size());
    for (StepOutput& out : outputs) {
      out.sequence = ++last_;
      kept_.push_back(std::make_shared<StepOutput>(std::move(out)));
    }
    return {kept_.begin() + first, kept_.end()};
  }

  // The caller has them.
  void clear() { kept_.clear(); }

  const Outputs& kept() const { return kept_; }

 private:
  Outputs kept_;
  std::int64_t last_ = 0;
};

}  // namespace specdec
