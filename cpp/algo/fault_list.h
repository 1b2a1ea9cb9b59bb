// The mistakes that algo/fault.h can switch on in tests.
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
};

}  // namespace specdec
