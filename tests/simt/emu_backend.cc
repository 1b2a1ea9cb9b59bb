// The emulated backend: the kernels of cuda/ on the CPU, through the operations' own entry points.
// Tensors are CPU tensors; kernels may touch only what a call exposes.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "backend/backend.h"
#include "device_table.h"
#include "simt/simt.h"

namespace specdec {
namespace {

struct EmulatedDevice {
  explicit EmulatedDevice(int) {}
  static DeviceLimits limits(int device);
};

// A small device, so that persistent kernels have several jobs per block even in small tests.
// SPECDEC_EMU_LIMITS = "major.minor,SMs,shared memory" chooses another, for instance an 8.0.
DeviceLimits EmulatedDevice::limits(int) {
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

void expose(const void* data, std::int64_t bytes, const char* name, bool writable) {
  simt::expose(data, static_cast<std::size_t>(bytes), name, writable);
}

}  // namespace
}  // namespace specdec

extern "C" __attribute__((visibility("default"))) const specdec::Backend* specdec_backend() {
  static const specdec::Backend backend = [] {
    specdec::Backend b = specdec::cuda::device_table<specdec::EmulatedDevice>();
    b.name = "cuda-emu";
    b.memory = specdec::DeviceType::kCpu;
    b.expose = specdec::expose;
    b.conceal = simt::conceal;
    return b;
  }();
  return &backend;
}

// Fixes the order in which the threads of later launches run.
extern "C" __attribute__((visibility("default"))) void specdec_seed(std::uint64_t seed) {
  simt::seed(seed);
}
