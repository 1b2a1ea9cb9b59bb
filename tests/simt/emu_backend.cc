// The emulated backend: the kernels of cuda/ on the CPU, through the operations' own entry points.
// Tensors are CPU tensors; kernels may touch only what a call exposes.
#include <cstring>

#include "backend/backend.h"
#include "device_table.h"
#include "simt/emulated_device.h"
#include "simt/limits.h"
#include "simt/simt.h"
#include "simt/streams.h"
#include "simt/tally.h"

namespace specdec {
namespace {

// Whatever a call is given may be the work of the kernel before it, but for weights and where the
// call says otherwise.
void expose(const void* data, std::int64_t bytes, const char* name, bool writable, bool settled) {
  settled = settled || std::strcmp(name, "weight") == 0;
  simt::expose(data, static_cast<std::size_t>(bytes), name, writable, settled);
}

simt::Stream stream_of(std::uintptr_t stream) { return reinterpret_cast<simt::Stream>(stream); }

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

// What `stream` is given from now on comes behind what `other` was given so far.
extern "C" __attribute__((visibility("default"))) void specdec_wait_for(std::uintptr_t stream,
                                                                        std::uintptr_t other) {
  simt::wait_for(specdec::stream_of(stream), simt::record(specdec::stream_of(other)));
}
// The host waits for all streams. Returns how many it had not waited for, and the first `room`.
extern "C" __attribute__((visibility("default"))) std::size_t specdec_synchronize(
    std::uintptr_t* streams, std::size_t room) {
  const auto busy = simt::busy();
  for (std::size_t i = 0; i < busy.size() && i < room; ++i) {
    streams[i] = reinterpret_cast<std::uintptr_t>(busy[i]);
  }
  simt::synchronize();
  return busy.size();
}
// Kernels that ran and of which no registers are recorded, one a line.
extern "C" __attribute__((visibility("default"))) const char* specdec_unrecorded() {
  static std::string lines;
  lines = simt::limits::unrecorded();
  return lines.c_str();
}
// Counts from now on how often kernels touch memory (simt/tally.h); of no use in the fast library.
extern "C" __attribute__((visibility("default"))) void specdec_begin_tally() {
  simt::tally::begin();
}
extern "C" __attribute__((visibility("default"))) const char* specdec_end_tally() {
  static std::string lines;
  lines = simt::tally::end();
  return lines.c_str();
}
