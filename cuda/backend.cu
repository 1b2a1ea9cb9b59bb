// The CUDA side of the backend, compiled instead of cpp/backend/no_cuda.cc when nvcc is found.
// The runtime is linked statically, so the module imports on a machine without a GPU or driver.
#include <cuda_runtime.h>

#include <mutex>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda_versions.h"
#include "device_table.h"

namespace specdec {

static_assert(CUDART_VERSION >= kOldestCudaToolkit, "the CUDA toolkit is too old");

namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::string device_fault_of(const cudaDeviceProp& device) {
  return device_fault(device.name, device.major, device.minor);
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "a device's properties");
  return value;
}

// Makes a device the calling thread's for the length of a call: a launch goes to the current one.
class CudaDevice {
 public:
  explicit CudaDevice(int device) {
    check(cudaGetDevice(&before_), "the current device");
    if (before_ != device) check(cudaSetDevice(device), "choosing a device");
    changed_ = before_ != device;
  }
  ~CudaDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  // Asked of the driver once per device: choosing a kernel is on the path of every call.
  static DeviceLimits limits(int device) {
    static std::mutex mutex;
    static std::vector<DeviceLimits> known(static_cast<std::size_t>(device_count()));
    const std::lock_guard lock(mutex);
    if (device < 0 || static_cast<std::size_t>(device) >= known.size()) {
      throw std::invalid_argument(detail::join("device=", device, ": ", known.size(),
                                               " CUDA devices are visible, counted from 0"));
    }
    DeviceLimits& limits = known[static_cast<std::size_t>(device)];
    if (limits.major == 0) {
      cudaDeviceProp prop;
      check(cudaGetDeviceProperties(&prop, device), "a device's properties");
      if (const std::string fault = device_fault_of(prop); !fault.empty()) {
        throw std::invalid_argument(fault);
      }
      limits.minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
      limits.num_sms = attribute(cudaDevAttrMultiProcessorCount, device);
      limits.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
      limits.l2_bytes = attribute(cudaDevAttrL2CacheSize, device);
      limits.major = attribute(cudaDevAttrComputeCapabilityMajor, device);
    }
    return limits;
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace

const Backend* cuda_backend() {
  static const bool usable = !cuda_info().devices.empty();
  if (!usable) return nullptr;
  static const Backend backend = [] {
    Backend table = cuda::device_table<CudaDevice>();
    table.name = "cuda";
    table.memory = DeviceType::kCuda;
    return table;
  }();
  return &backend;
}

CudaInfo cuda_info() {
  CudaInfo info;
  info.compiled = true;
  cudaRuntimeGetVersion(&info.runtime_version);
  cudaDriverGetVersion(&info.driver_version);
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    info.reason = driver_fault(info.driver_version, info.runtime_version);
    if (info.reason.empty()) info.reason = cudaGetErrorString(error);
    return info;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp prop;
    if (const cudaError_t fault = cudaGetDeviceProperties(&prop, i); fault != cudaSuccess) {
      info.reason = detail::join("device ", i, ": ", cudaGetErrorString(fault));
      continue;
    }
    if (std::string fault = device_fault_of(prop); !fault.empty()) {
      info.reason = std::move(fault);
      continue;
    }
    info.devices.push_back(std::string(prop.name) + ", compute capability " +
                           std::to_string(prop.major) + "." + std::to_string(prop.minor) + ", " +
                           std::to_string(prop.totalGlobalMem >> 20) + " MiB");
  }
  if (!info.devices.empty()) {
    info.reason.clear();
  } else if (info.reason.empty()) {
    info.reason = "no CUDA device is visible";
  }
  return info;
}

}  // namespace specdec
