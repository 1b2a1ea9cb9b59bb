// The ranks of cpp/algo/team.h made of the threads of a block, all of which are there.
#pragma once

#include <cstdint>

#include "gpu/gpu.cuh"

namespace specdec::cuda {

struct BlockTeam {
  __device__ __forceinline__ std::int32_t rank() const {
    return static_cast<std::int32_t>(threadIdx.x);
  }
  __device__ __forceinline__ std::int32_t size() const {
    return static_cast<std::int32_t>(blockDim.x);
  }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
};

}  // namespace specdec::cuda
