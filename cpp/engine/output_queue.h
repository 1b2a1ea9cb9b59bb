// What the last steps delivered, kept until the caller plans another one.
//
// Ctrl-C can strike between the return of a C++ call and the caller's next action; then the
// returned value is lost. So outputs stay here as well. A caller that plans a new step has taken
// them; a caller that was interrupted asks for them again. Each output has a growing number, so a
// caller can tell if it gets one twice.
//
// If no caller watches a request step by step, its outputs are held and delivered as one when there
// are enough, or when it ends, which saves Python work per step. Outputs up to the first token are
// not held. A caller that looks in between sees what is held (held()), which stays; when it is
// delivered later, since() takes out what was seen.
//
// keep() and clear() are called by one thread at a time, like plan(); the rest by any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "engine/request.h"

namespace specdec {

// Shared: every holder of an output has the same object.
using OutputPtr = std::shared_ptr<StepOutput>;
using Outputs = std::vector<OutputPtr>;

// What of `out` came after number `sequence`; nullptr: nothing.
OutputPtr since(const OutputPtr& out, std::int64_t sequence);

class OutputQueue {
 public:
  // From now on `most` outputs of a request come at once; 1: each as it is.
  void hold(RequestId id, int most);
  // Numbers the outputs of a step and holds those of requests that are not watched. Returns, and
  // keeps, the outputs to deliver now.
  Outputs keep(std::vector<StepOutput> outputs);
  // What is held of a request behind number `sequence`; nullptr: nothing.
  OutputPtr held(RequestId id, std::int64_t sequence) const;
  // The request is over, and what is held of it is no longer wanted.
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
