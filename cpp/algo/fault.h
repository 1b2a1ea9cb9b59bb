// Known mistakes of speculative samplers, for the tests of the tests.
//
// The package never makes one: fault() is false at compile time and the branch is gone. The C++
// tests are compiled with tests/cpp/faults/algo/fault.h in this file's place (include order, no
// macro), where one mistake at a time can be switched on; tests/cpp/test_wrong_samplers.cc proves
// that each is noticed by the statistics that the real sampler passes.
#pragma once

#include "algo/fault_list.h"
#include "base/types.h"

namespace specdec {

SPECDEC_HD constexpr bool fault(Fault) { return false; }

}  // namespace specdec
