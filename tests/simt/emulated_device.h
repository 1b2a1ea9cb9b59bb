// The device that the tests pretend to have: for the emulator and for the PTX stage (tests/ptx).
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "backend/device_limits.h"

namespace specdec {

// A small device, so that persistent kernels have several jobs per block even in small tests.
// SPECDEC_EMU_LIMITS = "major.minor,SMs,shared memory" chooses another, for instance an 8.0.
inline DeviceLimits emulated_limits() {
  DeviceLimits limits{.major = 9,
                      .minor = 0,
                      .num_sms = 4,
                      .shared_bytes = 227 << 10,
                      .l2_bytes = std::int64_t{50} << 20};
  if (const char* text = std::getenv("SPECDEC_EMU_LIMITS")) {
    if (std::sscanf(text, "%d.%d,%d,%d", &limits.major, &limits.minor, &limits.num_sms,
                    &limits.shared_bytes) != 4) {
      throw std::runtime_error(std::string("SPECDEC_EMU_LIMITS=") + text +
                               ": expected major.minor,SMs,shared memory");
    }
  }
  return limits;
}

struct EmulatedDevice {
  explicit EmulatedDevice(int) {}
  static DeviceLimits limits(int) { return emulated_limits(); }
};

}  // namespace specdec
