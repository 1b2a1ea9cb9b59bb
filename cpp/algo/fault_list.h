// The mistakes that algo/fault.h can switch on in tests: of samplers, then of the run-ahead
// executor's bookkeeping.
#pragma once

#include <cstdint>

namespace specdec {

enum class Fault : std::uint8_t {
  kNone,
  kAlwaysAccept,         // drafts are kept whatever the target says
  kConstantThreshold,    // kept when p / q is at least 1/2
  kArgmaxMatch,          // kept when it is the target's most likely token
  kResampleFromTarget,   // after a rejection: from p, not from the residual
  kSoftmaxOfResidual,    // the residual goes through a softmax instead of a division by its sum
  kSharedUniform,        // one number decides the rejection and the draw that follows
  kLastDraftUnverified,  // the last draft of a path is kept unseen
  kRowsShifted,          // a draft is judged by the row after it
  kStaleContext,         // K/V of accepted drafts stays where the tree had it
  kBonusFromWrongRow,    // the token after the last draft comes from the row before
  kBonusArgmax,          // that token is the most likely one
  kTemperatureOff,       // temperature 10 % too high
  kSiblingNotRemoved,    // a rejected sibling stays in the distribution of the next one
  kResidualNotUpdated,   // a second sibling is held against p, not against what the first one left

  kHoldWithoutDrafts,   // pages are held for one row of a step, not for its drafts
  kHoldWithoutFlight,   // pages are held as if no step were in flight
  kPagesBackEarly,      // pages of an ended request return while a step in flight names them
  kExcessBackEarly,     // after a delivery pages are kept for what is known alone
  kStagingReused,       // a place of the rings is written while its step is in flight
  kResultOfNewest,      // the results of the newest step are taken for those of the oldest
  kLateResult,          // a request that has ended gets what was in flight
  kCancelledRunsOn,     // a cancelled request is planned again
  kAdmitWithoutBound,   // a request is admitted when its prompt fits
  kEntryLost,           // a slot that a second request enters is not written
  kFrozenDrafts,        // a slot that has ended goes on (a mistake of the device)
  kPreemptedInFlight,   // a request's pages are taken while a step in flight names them
  kReadAgainTooLittle,  // a preempted request computes K/V of one token too few again
  kOldestPreempted,     // whoever lacks pages takes those of the oldest request
  kPageNotCopied,       // the last page of a request that comes back from the host is not copied
  kHostPagesKept,       // a request that has ended keeps its pages of the host's pool
};

}  // namespace specdec
