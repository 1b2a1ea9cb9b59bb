// How a head's 8 elements are stored in the pages: rounded to the pages' type, e4m3 divided by the
// head's scale first.
#pragma once

#include "backend/ops.h"
#include "kv/elements.cuh"

namespace specdec::cuda {

__device__ __forceinline__ float storage_scale(const KvCacheView& cache, const float* scales,
                                               std::int32_t stride, int head) {
  return cache.dtype == DType::kF8E4M3 && scales != nullptr ? scales[head * stride] : 1.0f;
}

__device__ __forceinline__ void store_scaled(float (&x)[kLaneElements], float scale, void* pages,
                                             DType dtype, std::int64_t at, bool aligned) {
  if (scale != 1.0f) {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) x[i] = x[i] / scale;
  }
  store_floats(x, pages, dtype, at, aligned);
}

inline bool aligned_pages(const KvCacheView& cache) {
  return aligned_for_lanes(cache.k, cache.dtype, cache.stride_layer, cache.stride_page,
                           cache.stride_head, cache.stride_token) &&
         aligned_for_lanes(cache.v, cache.dtype, cache.stride_layer, cache.stride_page,
                           cache.stride_head, cache.stride_token);
}

}  // namespace specdec::cuda
