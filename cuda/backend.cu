// The CUDA side of the backend, compiled instead of cpp/backend/no_cuda.cc when nvcc is found.
// The runtime is linked statically, so the module imports on a machine without a GPU or driver.
#include <cuda_runtime.h>

#include <string>

#include "backend/backend.h"

namespace specdec {

CudaInfo cuda_info() {
  CudaInfo info;
  info.compiled = true;
  cudaRuntimeGetVersion(&info.runtime_version);
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    info.reason = cudaGetErrorString(error);
    return info;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp prop;
    if (cudaGetDeviceProperties(&prop, i) != cudaSuccess) continue;
    info.devices.push_back(std::string(prop.name) + ", compute capability " +
                           std::to_string(prop.major) + "." + std::to_string(prop.minor) + ", " +
                           std::to_string(prop.totalGlobalMem >> 20) + " MiB");
  }
  if (info.devices.empty()) info.reason = "no CUDA device is visible";
  return info;
}

}  // namespace specdec
