// A plug-in backend whose kernels run from their PTX: the host code and the PTX that nvcc made of
// cuda/, on the runtime beside this file. Tensors are CPU tensors.
#include "backend/backend.h"
#include "device_table.h"
#include "ptx/machine.h"
#include "simt/emulated_device.h"

namespace ptx {
void seed(std::uint64_t s);
std::size_t synchronize(std::uintptr_t* streams, std::size_t room);
}  // namespace ptx

extern "C" __attribute__((visibility("default"))) const specdec::Backend* specdec_backend() {
  static const specdec::Backend backend = [] {
    specdec::Backend b = specdec::cuda::device_table<specdec::EmulatedDevice>();
    b.name = "cuda-ptx";
    b.memory = specdec::DeviceType::kCpu;
    // Launches run one after another here: nothing is in flight.
    b.expose = [](const void* data, std::int64_t bytes, const char* name, bool writable, bool) {
      ptx::expose(data, static_cast<std::size_t>(bytes), name, writable);
    };
    b.conceal = ptx::conceal;
    return b;
  }();
  return &backend;
}

// Fixes the order in which the blocks and warps of later launches run.
extern "C" __attribute__((visibility("default"))) void specdec_seed(std::uint64_t seed) {
  ptx::seed(seed);
}

// As the emulator's: the streams that were given something since the last call. Launches run in the
// order of the calls, whatever their streams; registers are the emulator's matter.
extern "C" __attribute__((visibility("default"))) std::size_t specdec_synchronize(
    std::uintptr_t* streams, std::size_t room) {
  return ptx::synchronize(streams, room);
}
extern "C" __attribute__((visibility("default"))) const char* specdec_unrecorded() { return ""; }
