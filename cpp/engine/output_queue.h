// What the last steps delivered, kept until the caller plans another one.
//
// Ctrl-C can strike between the return of a C++ call and the caller's next act: what the call
// returned is lost then. So outputs stay here as well. Whoever plans a new step has taken them;
// whoever was interrupted asks for them again. Each output has a number, and numbers grow, so a
// caller that meets an output twice can tell.
//
// A request that nobody watches step by step has its outputs held, and delivered as one when there
// are enough, or when it ends: Python's work per step and request is then that of a few. What comes
// before its first token, and that, is not held. Whoever looks in between is shown what is held
// (held()), which stays; once it is delivered as well, since() takes out what was seen.
//
// keep() and clear() are called by one thread at a time, like plan(); the rest by any.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "engine/request.h"

namespace specdec {

// Each is one object, whoever has it.
using OutputPtr = std::shared_ptr<StepOutput>;
using Outputs = std::vector<OutputPtr>;

// What of `out` came after number `sequence`; nullptr: nothing.
OutputPtr since(const OutputPtr& out, std::int64_t sequence);

class OutputQueue {
 public:
  // From now on `most` outputs of a request come at once; 1: each as it is.
  void hold(RequestId id, int most);
  // Numbers the outputs of a step and holds those of requests that nobody watches. Returns, and
  // keeps, what is due.
  Outputs keep(std::vector<StepOutput> outputs);
  // What is held of a request behind number `sequence`; nullptr: nothing.
  OutputPtr held(RequestId id, std::int64_t sequence) const;
  // The request is over, and nobody wants what is held of it.
  void drop(RequestId id);

  // The caller has them.
  void clear();
  const Outputs& kept() const { return kept_; }

 private:
  struct Held {
    int most = 1;
    bool begun = false;  // its first token was delivered
    Outputs parts;
  };

  Outputs kept_;
  std::int64_t last_ = 0;
  mutable std::mutex mutex_;  // guards what follows
  std::unordered_map<RequestId, Held> held_;
};

}  // namespace specdec
