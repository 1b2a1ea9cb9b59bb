// Elements of q, K and V as float32, whatever they are stored as. A lane handles 8 at a time: head
// dims are multiples of 8, so 16-bit heads go in 16-byte words. Types are chosen at run time by a
// branch that a whole warp takes together; it costs little beside the memory access.
#pragma once

#include <cstdint>

#include "base/types.h"
#include "gpu/gpu.cuh"

namespace specdec::cuda {

inline constexpr int kLaneElements = 8;

using E4M3 = __nv_fp8_e4m3;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(E4M3 x) { return static_cast<float>(x); }

// Nearest even; e4m3 saturates at 448 and keeps NaN.
__device__ __forceinline__ void narrow(float x, float& to) { to = x; }
__device__ __forceinline__ void narrow(float x, __half& to) { to = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void narrow(float x, E4M3& to) {
  to.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

// kElements elements as one or two vectors of at most 16 bytes, or one by one where the address is
// not aligned to that. `aligned` is the same for all threads of a launch.
template <class T, int kElements>
struct Pack {
  static constexpr int kBytes = kElements * static_cast<int>(sizeof(T));
  static constexpr int kWordBytes = kBytes < 16 ? kBytes : 16;
  static constexpr int kWords = kBytes / kWordBytes;
  static_assert(kWordBytes == 16 || kWordBytes == 8 || kWordBytes == 4);
  using Word = std::conditional_t<kWordBytes == 16, uint4,
                                  std::conditional_t<kWordBytes == 8, uint2, std::uint32_t>>;
  union {
    Word words[kWords];
    T items[kElements];
  };
  __device__ __forceinline__ Pack() {}

  __device__ __forceinline__ void load(const T* from, bool aligned) {
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const Word*>(from)[i];
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) items[i] = from[i];
    }
  }
  __device__ __forceinline__ void store(T* to, bool aligned) const {
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) reinterpret_cast<Word*>(to)[i] = words[i];
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) to[i] = items[i];
    }
  }
};

template <class T, int kElements>
__device__ __forceinline__ void load_floats(const T* from, bool aligned, float (&x)[kElements]) {
  Pack<T, kElements> pack;
  pack.load(from, aligned);
#pragma unroll
  for (int i = 0; i < kElements; ++i) x[i] = widen(pack.items[i]);
}

template <class T, int kElements>
__device__ __forceinline__ void store_floats(const float (&x)[kElements], T* to, bool aligned) {
  Pack<T, kElements> pack;
#pragma unroll
  for (int i = 0; i < kElements; ++i) narrow(x[i], pack.items[i]);
  pack.store(to, aligned);
}

// The same, by run-time type; `at` counts elements from `base`.
template <int kElements>
__device__ __forceinline__ void load_floats(const void* base, DType dtype, std::int64_t at,
                                            bool aligned, float (&x)[kElements]) {
  switch (dtype) {
    case DType::kBF16:
      return load_floats(static_cast<const __nv_bfloat16*>(base) + at, aligned, x);
    case DType::kF16:
      return load_floats(static_cast<const __half*>(base) + at, aligned, x);
    case DType::kF8E4M3:
      return load_floats(static_cast<const E4M3*>(base) + at, aligned, x);
    default:
      return load_floats(static_cast<const float*>(base) + at, aligned, x);
  }
}

template <int kElements>
__device__ __forceinline__ void store_floats(const float (&x)[kElements], void* base, DType dtype,
                                             std::int64_t at, bool aligned) {
  switch (dtype) {
    case DType::kBF16:
      return store_floats(x, static_cast<__nv_bfloat16*>(base) + at, aligned);
    case DType::kF16:
      return store_floats(x, static_cast<__half*>(base) + at, aligned);
    case DType::kF8E4M3:
      return store_floats(x, static_cast<E4M3*>(base) + at, aligned);
    default:
      return store_floats(x, static_cast<float*>(base) + at, aligned);
  }
}

__device__ __forceinline__ void store_float(float x, void* base, DType dtype, std::int64_t at) {
  switch (dtype) {
    case DType::kBF16:
      return narrow(x, static_cast<__nv_bfloat16*>(base)[at]);
    case DType::kF16:
      return narrow(x, static_cast<__half*>(base)[at]);
    case DType::kF8E4M3:
      return narrow(x, static_cast<E4M3*>(base)[at]);
    default:
      return narrow(x, static_cast<float*>(base)[at]);
  }
}

// May elements at `pointer` plus multiples of `strides` be accessed 8 at a time?
template <class... Strides>
inline bool aligned_for_lanes(const void* pointer, DType dtype, Strides... strides) {
  const std::size_t bytes = kLaneElements * dtype_bytes(dtype);
  const std::size_t word = bytes < 16 ? bytes : 16;
  return reinterpret_cast<std::uintptr_t>(pointer) % word == 0 &&
         ((strides * static_cast<std::int64_t>(dtype_bytes(dtype)) %
               static_cast<std::int64_t>(word) ==
           0) &&
          ...);
}

}  // namespace specdec::cuda
