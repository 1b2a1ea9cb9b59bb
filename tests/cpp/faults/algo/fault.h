// In place of cpp/algo/fault.h in the C++ tests: one mistake at a time can be switched on.
#pragma once

#include "algo/fault_list.h"
#include "base/types.h"

namespace specdec {

inline Fault active_fault = Fault::kNone;

inline bool fault(Fault which) { return which == active_fault; }

}  // namespace specdec
