// The emulated backend: the kernels of cuda/ on the CPU, through the operations' own entry points.
// Tensors are CPU tensors; kernels may touch only what a call exposes.
#include "backend/backend.h"
#include "device_table.h"
#include "simt/emulated_device.h"
#include "simt/simt.h"

namespace specdec {
namespace {

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
