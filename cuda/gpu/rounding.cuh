// Sums and products that round towards zero: names of CUDA C++ under nvcc; the emulator's bodies
// are in tests/simt/rounding.h. Apart from gpu.cuh, as few kernels want them.
#pragma once
#if !defined(__CUDACC__)
#include "simt/rounding.h"
#else
#include <cuda_runtime.h>

namespace specdec::gpu {

__device__ __forceinline__ float add_towards_zero(float a, float b) { return __fadd_rz(a, b); }
__device__ __forceinline__ float fma_towards_zero(float a, float b, float c) {
  return __fmaf_rz(a, b, c);
}

}  // namespace specdec::gpu
#endif
