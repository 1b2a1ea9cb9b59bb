// The matrix products of a consumer warpgroup with e4m3 operands, over e4m3 pages: twice the matrix
// rate of 16-bit ones, for queries and weights of 3 mantissa bits. Only ever chosen by name. What
// each function does is said in hopper_products.cuh, the kernel is hopper.cuh's.
//
// grid    as hopper.cuh
// block   as hopper.cuh: warp 0 has the copy engine fill the ring, K straight into the consumers'
//         tiles; warps 1 to 3 transpose V (hopper_transpose.cuh); 1 or 2 consumer warpgroups
// Q       a row is multiplied by the power of two that brings its largest number to [128, 256) and
//         rounded; the power's inverse goes into the factor of its scores
// P       2^(score - reference), the reference 8 below the row's running maximum: weights reach 256
//         of e4m3's 448, and what is 2^-17 of the largest still counts. Rounded for P V; the row's
//         sum is taken before rounding
// sums    the products' accumulators keep fewer bits than float32: each block of 64 keys has its
//         own, which are added to float32 sums, O = O * decay + P V
// memory  shared, 2 consumers: 6 stages of K and of V as loaded (16 KB), 4 of transposed V (8 KB),
//         folded sums 64 KB, 194 KB in all
// cost    per 64 keys and 64 rows at K = 128: 6 QGMMA (4 of 64x64x32, 2 of 64x128x32), 256 tensor
//         cycles; the exponentials take the MUFU as long, 256 cycles, and P V's promotion 64 FFMA
//         per thread, 64 cycles of all lanes. So two consumers that hide each other's softmax are
//         bound by tensor cores and MUFU alike
// limits  memory: 16 KB per block of keys, half of hopper.cuh
//
// A row's bits: as hopper.cuh; its keys end at a multiple of 32, what one instruction sums.
#pragma once

#include <cstdint>

#include "attention/elements.cuh"
#include "attention/hopper_fp8_tile.h"
#include "attention/hopper_products.cuh"
#include "attention/hopper_rows.cuh"
#include "attention/spec_attention.h"
#include "gpu/hopper.cuh"

namespace specdec::attention::hopper {

// Four floats as e4m3, the first in the lowest byte: to nearest, at most 448, NaN stays NaN.
__device__ __forceinline__ std::uint32_t pack_e4m3(float a, float b, float c, float d) {
  const std::uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const std::uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

template <class T, int kHeadDim, int kConsumerGroups>
class Products<T, HopperFp8Tile<kHeadDim, kConsumerGroups>> {
  using Tile = HopperFp8Tile<kHeadDim, kConsumerGroups>;

 public:
  static constexpr float kMaxLag = 0.0f;
  static constexpr float kHeadroom = 8.0f;  // log2 of the greatest weight

  __device__ __forceinline__ Products(HopperShared<Tile>&, int) {}

  __device__ __forceinline__ void load(const AttentionLaunch& launch, const JobRows& rows) {
    const SpecAttentionParams& call = launch.call;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp_row = static_cast<int>(threadIdx.x / 32 % 4) * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t row = warp_row + lane / 4 + 8 * half;
      const bool exists = rows.exists(row, launch.group);
      const std::int32_t token = (rows.first_row + row) / launch.group;
      const std::int32_t head = rows.kv_head * launch.group + (rows.first_row + row) % launch.group;
      const T* q = static_cast<const T*>(call.q) +
                   (rows.request.first_row + token) * call.q_row_stride + head * Tile::kDim +
                   4 * (lane % 4);
      uint2 in[Tile::kDim / 16];
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < Tile::kDim / 16; ++i) {
        in[i] = exists ? *reinterpret_cast<const uint2*>(q + 16 * i) : make_uint2(0, 0);
        const float2 low = unpack<T>(in[i].x), high = unpack<T>(in[i].y);
        largest = fmaxf(
            largest, fmaxf(fmaxf(fabsf(low.x), fabsf(low.y)), fmaxf(fabsf(high.x), fabsf(high.y))));
      }
      const float factor = power_for(gpu::quad_max(largest), unit_[half]);
#pragma unroll
      for (int i = 0; i < Tile::kDim / 16; ++i) {
        const float2 low = unpack<T>(in[i].x), high = unpack<T>(in[i].y);
        fragments_[i / 2][half + i % 2 * 2] =
            pack_e4m3(low.x * factor, low.y * factor, high.x * factor, high.y * factor);
      }
    }
  }

  __device__ __forceinline__ void multiply_keys(const unsigned char* k,
                                                float (&s)[kBlockKeys / 2]) {
    const std::uint64_t keys = gpu::wgmma_descriptor(k, gpu::Swizzle::b128, 0, 8 * Tile::kDim);
#pragma unroll
    for (int step = 0; step < Tile::kDim / 32; ++step) {
      gpu::wgmma_rs_m64k32_e4m3<kBlockKeys>(s, fragments_[step], gpu::wgmma_behind(keys, step * 32),
                                            step > 0);
    }
  }
  __device__ __forceinline__ float unit(int row) const { return unit_[row]; }

  __device__ __forceinline__ void rescale(const float (&decay)[2], bool) {
    decay_[0] = decay[0], decay_[1] = decay[1];
  }
  // Two groups of 8 keys, columns 2 t and 2 t + 1 of each, are 4 neighbours of A.
  __device__ __forceinline__ void pack_weights(const float (&s)[kBlockKeys / 2]) {
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float* two = &s[8 * i + 2 * row];
        p_[i / 2][row + i % 2 * 2] = pack_e4m3(two[0], two[1], two[4], two[5]);
      }
    }
  }

  // part = P V. V lies as [column, key], 32 keys to an instruction.
  __device__ __forceinline__ void multiply_values(const unsigned char* v) {
    const std::uint64_t values = gpu::wgmma_descriptor(v, gpu::Swizzle::b64, 0, 8 * kBlockKeys);
#pragma unroll
    for (int step = 0; step < kBlockKeys / 32; ++step) {
      gpu::wgmma_rs_m64k32_e4m3<Tile::kDim>(part_, p_[step], gpu::wgmma_behind(values, step * 32),
                                            step > 0);
    }
  }
  __device__ __forceinline__ void hold() { gpu::wgmma_hold(part_); }
  __device__ __forceinline__ void collect() {
#pragma unroll
    for (int i = 0; i < Tile::kDim / 2; ++i) o_[i] = fmaf(o_[i], decay_[i / 2 % 2], part_[i]);
  }
  __device__ __forceinline__ float& sum(int i) { return o_[i]; }

 private:
  // The power of two that brings `largest` to [128, 256), and its inverse; what is below 2^-31
  // stays small, so that a factor of scores never becomes 0. A row that holds an infinity becomes
  // NaN, not 448.
  static __device__ __forceinline__ float power_for(float largest, float& inverse) {
    const std::uint32_t exponent = max(__float_as_uint(largest) >> 23, 96u);
    inverse = __uint_as_float((exponent - 7) << 23);
    return exponent == 255 ? __uint_as_float(0x7fc00000u) : __uint_as_float((261 - exponent) << 23);
  }

  std::uint32_t fragments_[Tile::kDim / 32][4];  // two rows of a thread as e4m3 A operands
  float unit_[2];
  float o_[Tile::kDim / 2], part_[Tile::kDim / 2];
  float decay_[2];
  std::uint32_t p_[kBlockKeys / 32][4];
};

}  // namespace specdec::attention::hopper
