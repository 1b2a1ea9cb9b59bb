// Would the statistical tests notice? Each known mistake of a speculative sampler is switched on in
// the executor and its joint law is rejected by the chi-square that the right sampler passes.
#include <algorithm>

#include "algo/fault.h"
#include "check.h"
#include "table_world.h"

namespace specdec::testing {
namespace {

constexpr int kDraws = 20'000;

const Drafting kChain = {{-1, 0, 1}};
const Drafting kSiblings = {{-1, -1, -1, 0}};
const Drafting kTree = {{-1, -1, 0, 0, 1}};

bool noticed(Fault fault, const Drafting& drafting) {
  World world(3);
  active_fault = fault;
  Run run(world, drafting);
  const std::vector<std::int64_t> counts = run.counts(kDraws);
  active_fault = Fault::kNone;
  CHECK(run.accepted() > kDraws / 10);
  return rejected(counts, world.joint_law());
}

TEST(the_right_sampler_passes) {
  for (const Drafting& drafting : {kChain, kSiblings, kTree}) {
    CHECK(!noticed(Fault::kNone, drafting));
  }
}

TEST(every_wrong_sampler_is_rejected) {
  struct Case {
    Fault fault;
    const char* name;
    Drafting drafting;
  };
  Drafting filtered = kChain;
  filtered.filtered = true;
  const Case cases[] = {
      {Fault::kAlwaysAccept, "always accept", kChain},
      {Fault::kConstantThreshold, "threshold accept", kChain},
      {Fault::kArgmaxMatch, "argmax match", kChain},
      {Fault::kResampleFromTarget, "resample from p", kChain},
      {Fault::kSoftmaxOfResidual, "softmax of the residual", kChain},
      {Fault::kSharedUniform, "one number for acceptance and draw", kChain},
      {Fault::kNone, "drafter reports the raw law", filtered},
      {Fault::kLastDraftUnverified, "last draft never verified", kChain},
      {Fault::kRowsShifted, "rows shifted by one", kChain},
      {Fault::kStaleContext, "stale context", kTree},
      {Fault::kBonusFromWrongRow, "bonus from the wrong row", kChain},
      {Fault::kBonusArgmax, "bonus always argmax", kChain},
      {Fault::kTemperatureOff, "temperature 10 % off", kChain},
      {Fault::kSiblingNotRemoved, "rejected sibling stays in q", kSiblings},
      {Fault::kResidualNotUpdated, "second sibling held against p", kSiblings},
  };
  for (const Case& wrong : cases) {
    if (!noticed(wrong.fault, wrong.drafting)) fail(__FILE__, __LINE__, wrong.name);
  }
}

}  // namespace
}  // namespace specdec::testing
