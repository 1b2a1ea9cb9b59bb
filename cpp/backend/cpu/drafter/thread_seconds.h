// The processor time of the calling thread: what a benchmark holds against its whole step.
#pragma once

#include <time.h>

namespace specdec::cpu {

inline double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace specdec::cpu
