// A backend is a table of device operations. Which backends exist is decided by which file CMake
// compiles: cpp/backend/no_cuda.cc or cuda/backend.cu define cuda_backend().
#pragma once

#include <string>
#include <vector>

#include "backend/ops.h"

namespace specdec {

struct Backend {
  const char* name;
  void (*append_kv)(const AppendKvParams&);
  void (*spec_attention)(const SpecAttentionParams&);
  void (*compact_kv)(const CompactKvParams&);
  void (*argmax)(const ArgmaxParams&);
};

const Backend& cpu_backend();

// What the CUDA side of this build knows about itself and the machine.
struct CudaInfo {
  bool compiled = false;             // was the package built with nvcc?
  int runtime_version = 0;           // e.g. 13000
  std::vector<std::string> devices;  // one line per usable GPU
  std::string reason;                // why there is none
};
CudaInfo cuda_info();

}  // namespace specdec
