// Compiled instead of cuda/backend.cu when the package is built without nvcc.
#include "backend/backend.h"

namespace specdec {

const Backend* cuda_backend() { return nullptr; }

CudaInfo cuda_info() {
  CudaInfo info;
  info.reason =
      "this build has no CUDA code: rebuild with nvcc on PATH (or CUDACXX set) and SPECDEC_CUDA=ON";
  return info;
}

}  // namespace specdec
