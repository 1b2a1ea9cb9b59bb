// What a launch may take of a device, and what the compiled kernels take: a launch that hardware
// would refuse is an error here.
#pragma once

#include <string>

#include "simt/simt.h"

namespace simt::limits {

// Returns the registers of a thread at entry as recorded of the compiled kernel; 0: no record, as
// of the kernels of test programs. Throws Error if the emulated device would refuse the launch.
unsigned check(const LaunchShape&);

// For tests: such a record.
void record(const void* kernel, unsigned registers);

// The package's kernels that were launched and have no record, one a line.
std::string unrecorded();

}  // namespace simt::limits
