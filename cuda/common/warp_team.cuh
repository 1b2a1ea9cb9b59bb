// The team of cpp/algo/team.h made of the 32 lanes of one warp. All lanes must be active.
#pragma once

#include <cstdint>

#include "gpu/gpu.cuh"

namespace specdec {

struct WarpTeam {
  __device__ __forceinline__ std::int32_t rank() const {
    return static_cast<std::int32_t>(threadIdx.x & 31u);
  }
  __device__ __forceinline__ std::int32_t size() const { return 32; }
  // Orders global and shared memory among the lanes of the warp.
  __device__ __forceinline__ void sync() const { __syncwarp(kAllLanes); }
  __device__ __forceinline__ bool any(bool flag) const {
    return __any_sync(kAllLanes, flag ? 1 : 0) != 0;
  }
  __device__ __forceinline__ std::int32_t scan(std::int32_t value, std::int32_t* total) const {
    const std::int32_t inclusive = gpu::warp_scan(value);
    *total = __shfl_sync(kAllLanes, inclusive, 31);
    return inclusive - value;
  }
};

}  // namespace specdec
