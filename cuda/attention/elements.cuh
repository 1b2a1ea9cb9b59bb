// Element types of attention: pairs of 16-bit numbers as the matrix instructions take them, and
// e4m3 as the cache stores it. Every conversion here is exact except pack(), which rounds to
// nearest.
#pragma once

#include <cstdint>

#include "gpu/gpu.cuh"

namespace specdec::attention {

// Two floats as one register of T, the first in the low half.
template <class T>
__device__ __forceinline__ std::uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ std::uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

template <class T>
__device__ __forceinline__ float2 unpack(std::uint32_t pair);

template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(std::uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack<__half>(std::uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// The e4m3 numbers in bytes 1 and 3 as a pair of T. Their bits, moved into place, are the number
// times a power of two (2^-8 for float16, 2^-120 for bfloat16), subnormals included, so that one
// multiplication is exact. A NaN becomes 480: see e4m3_nan().
template <class T>
__device__ __forceinline__ std::uint32_t e4m3_pair(std::uint32_t bytes13);

template <>
__device__ __forceinline__ std::uint32_t e4m3_pair<__half>(std::uint32_t bytes13) {
  const std::uint32_t bits = gpu::and_or(bytes13, 0x80008000u, bytes13 >> 1 & 0x3f803f80u);
  const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(256.0f));
  return *reinterpret_cast<const std::uint32_t*>(&value);
}
template <>
__device__ __forceinline__ std::uint32_t e4m3_pair<__nv_bfloat16>(std::uint32_t bytes13) {
  const std::uint32_t bits = gpu::and_or(bytes13, 0x80008000u, bytes13 >> 4 & 0x07f007f0u);
  const __nv_bfloat162 value =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), __float2bfloat162_rn(0x1p120f));
  return *reinterpret_cast<const std::uint32_t*>(&value);
}

// Four e4m3 numbers as two pairs of T.
template <class T>
__device__ __forceinline__ uint2 widen_e4m3(std::uint32_t four) {
  return make_uint2(e4m3_pair<T>(__byte_perm(four, 0u, 0x1404u)),
                    e4m3_pair<T>(__byte_perm(four, 0u, 0x3424u)));
}

// Non-zero if one of four e4m3 numbers is a NaN (all bits below the sign set).
__device__ __forceinline__ std::uint32_t e4m3_nan(std::uint32_t four) {
  return ((four & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

// kCount consecutive numbers of a 16-bit type or e4m3 as floats, in one load.
template <class T, int kCount>
__device__ __forceinline__ void load_floats(const T* from, float (&to)[kCount]) {
  static_assert(kCount == 2 || kCount == 4 || kCount == 8);
  std::uint32_t words[kCount / 2];
  if constexpr (kCount == 8) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  } else if constexpr (kCount == 4) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    words[0] = two.x, words[1] = two.y;
  } else {
    words[0] = *reinterpret_cast<const std::uint32_t*>(from);
  }
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const float2 pair = unpack<T>(words[i]);
    to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
  }
}

template <int kCount>
__device__ __forceinline__ void load_floats(const __nv_fp8_e4m3* from, float (&to)[kCount]) {
  static_assert(kCount == 2 || kCount == 4 || kCount == 8);
  std::uint32_t words[kCount == 8 ? 2 : 1];
  if constexpr (kCount == 8) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    words[0] = two.x, words[1] = two.y;
  } else if constexpr (kCount == 4) {
    words[0] = *reinterpret_cast<const std::uint32_t*>(from);
  } else {
    words[0] = *reinterpret_cast<const std::uint16_t*>(from);
  }
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const std::uint32_t two = words[i / 4] >> (i % 4 * 8);
    const float2 pair =
        unpack<__half>(e4m3_pair<__half>(((two << 8) & 0xff00u) | ((two << 16) & 0xff000000u)));
    const float nan = __uint_as_float(0x7fc00000u);
    to[i] = (two & 0x7fu) == 0x7fu ? nan : pair.x;
    to[i + 1] = (two & 0x7f00u) == 0x7f00u ? nan : pair.y;
  }
}

}  // namespace specdec::attention
