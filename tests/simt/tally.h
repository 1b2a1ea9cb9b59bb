// How often the kernels of a launch touched memory, by place in the source and array: for tests
// that hold what somebody says of a kernel's loops against a run of it. Only what the checker sees
// counts.
#pragma once

#include <string>

#include "simt/simt.h"

namespace simt::tally {

inline bool on;  // are accesses counted?
// pc: of an instruction, or null and the place says it. array: as it was exposed; "shared".
void note(const void* pc, Site, const std::string& array, unsigned bytes, bool write);

void begin();  // forgets all, and counts from now on
// Counts no longer. One line for each place: "read" or "write", the array ("-": no name), how
// often, bytes, and FILE:LINE or an address within the library.
std::string end();

}  // namespace simt::tally
