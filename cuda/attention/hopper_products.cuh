// The matrix products of a consumer warpgroup with 16-bit operands: its queries, the weights of a
// block of keys, and the sums of values, which are the accumulators of P V.
//
// Products is what the consumers' text (hopper_consumer.cuh) leaves to the type of the operands; of
// e4m3 it is in hopper_fp8.cuh. In order of use:
//   load()              the queries of a unit
//   multiply_keys()     issues S = Q K^T; a row's numbers count unit(row) each
//   rescale()           by what the sums shrink before the next values are added; a row of the warp
//                       shrinks only if `moved`
//   pack_weights()      the block's exponentials become the A operand of P V
//   multiply_values()   issues P V; hold() names the registers that it writes
//   collect()           P V is done: sum(i) has the values of all blocks until then
#pragma once

#include <cstdint>

#include "attention/elements.cuh"
#include "attention/hopper_rows.cuh"
#include "attention/hopper_tile.h"
#include "attention/spec_attention.h"
#include "gpu/hopper.cuh"

namespace specdec::attention::hopper {

template <class T, class Tile>
class Products;

// The queries of a warpgroup's rows as the A operand of S = Q K^T; zeros for rows that do not
// exist.
template <class T, class Tile, bool kInRegisters = Tile::kQueriesInRegisters>
class Queries;

template <class T, class Tile>
class Queries<T, Tile, true> {
 public:
  __device__ __forceinline__ Queries(HopperShared<Tile>&, int) {}

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
                   (rows.request.first_row + token) * call.q_row_stride + head * Tile::kDim;
      constexpr int kVectors = Tile::kDim / 8;
      // The four lanes of a row bring vectors of 8 columns; word i of each is lane i's.
#pragma unroll
      for (int first = 0; first < kVectors; first += 4) {
        uint4 vector = make_uint4(0, 0, 0, 0);
        if (exists && first + lane % 4 < kVectors) {
          vector = reinterpret_cast<const uint4*>(q)[first + lane % 4];
        }
        std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
        gpu::quad_transpose(words);
#pragma unroll
        for (int i = 0; i < 4 && first + i < kVectors; ++i) {
          fragments_[(first + i) / 2][half + (first + i) % 2 * 2] = words[i];
        }
      }
    }
  }

  // s = Q K^T for the block of keys in k.
  __device__ __forceinline__ void multiply(const unsigned char* k, float (&s)[kBlockKeys / 2]) {
    const std::uint64_t keys = gpu::wgmma_descriptor(k, gpu::Swizzle::b128, 0, 1024);
#pragma unroll
    for (int step = 0; step < Tile::kDim / 16; ++step) {
      gpu::wgmma_rs_m64k16<T, kBlockKeys>(
          s, fragments_[step], gpu::wgmma_behind(keys, step / 4 * Tile::kBoxBytes + step % 4 * 32),
          step > 0);
    }
  }

 private:
  std::uint32_t fragments_[Tile::kDim / 16][4];
};

// In shared memory: boxes of 64 rows x 64 columns, swizzled as the copy engine would.
template <class T, class Tile>
class Queries<T, Tile, false> {
 public:
  __device__ __forceinline__ Queries(HopperShared<Tile>& shared, int consumer)
      : tile_(shared.q + consumer * Tile::kTileBytes), barrier_(1 + consumer) {}

  __device__ __forceinline__ void load(const AttentionLaunch& launch, const JobRows& rows) {
    constexpr int kVectors = Tile::kDim / 8;  // of a row, 16 bytes each
    const SpecAttentionParams& call = launch.call;
    gpu::named_barrier_sync(barrier_, 128);  // all warps are done with the queries before
    for (int i = static_cast<int>(threadIdx.x % 128); i < 64 * kVectors; i += 128) {
      const std::int32_t row = i / kVectors, vector = i % kVectors;
      uint4 q = make_uint4(0, 0, 0, 0);
      if (rows.exists(row, launch.group)) {
        const std::int32_t token = (rows.first_row + row) / launch.group;
        const std::int32_t head =
            rows.kv_head * launch.group + (rows.first_row + row) % launch.group;
        q = *reinterpret_cast<const uint4*>(static_cast<const T*>(call.q) +
                                            (rows.request.first_row + token) * call.q_row_stride +
                                            head * Tile::kDim + 8 * vector);
      }
      reinterpret_cast<uint4*>(
          tile_)[vector / 8 * (Tile::kBoxBytes / 16) + row * 8 + ((vector ^ row) & 7)] = q;
    }
    gpu::fence_proxy_async();
    gpu::named_barrier_sync(barrier_, 128);
  }

  __device__ __forceinline__ void multiply(const unsigned char* k, float (&s)[kBlockKeys / 2]) {
    const std::uint64_t queries = gpu::wgmma_descriptor(tile_, gpu::Swizzle::b128, 0, 1024);
    const std::uint64_t keys = gpu::wgmma_descriptor(k, gpu::Swizzle::b128, 0, 1024);
#pragma unroll
    for (int step = 0; step < Tile::kDim / 16; ++step) {
      const int offset = step / 4 * Tile::kBoxBytes + step % 4 * 32;
      gpu::wgmma_m64k16<T, kBlockKeys>(s, gpu::wgmma_behind(queries, offset),
                                       gpu::wgmma_behind(keys, offset), step > 0);
    }
  }

 private:
  unsigned char* tile_;
  int barrier_;
};

template <class T, int kHeadDim, int kConsumerGroups, bool kE4m3>
class Products<T, HopperTile<kHeadDim, kConsumerGroups, kE4m3>> {
  using Tile = HopperTile<kHeadDim, kConsumerGroups, kE4m3>;

 public:
  // The running reference of the exponents follows the greatest score only when it lags by more
  // than this (in units of log2), a row's own affair. So a row's sums are rarely rescaled, and
  // those of a warp's 16 rows often all stay as they are. P reaches 2^8, which both 16-bit types
  // hold.
  static constexpr float kMaxLag = 8.0f;
  static constexpr float kHeadroom = 0.0f;

  __device__ __forceinline__ Products(HopperShared<Tile>& shared, int consumer)
      : queries_(shared, consumer) {}

  __device__ __forceinline__ void load(const AttentionLaunch& launch, const JobRows& rows) {
    queries_.load(launch, rows);
  }
  __device__ __forceinline__ void multiply_keys(const unsigned char* k,
                                                float (&s)[kBlockKeys / 2]) {
    queries_.multiply(k, s);
  }
  __device__ __forceinline__ float unit(int) const { return 1.0f; }

  __device__ __forceinline__ void rescale(const float (&decay)[2], bool moved) {
    if (!moved) return;
#pragma unroll
    for (int i = 0; i < Tile::kDim / 2; ++i) o_[i] *= decay[i / 2 % 2];
  }
  __device__ __forceinline__ void pack_weights(const float (&s)[kBlockKeys / 2]) {
#pragma unroll
    for (int step = 0; step < kBlockKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        p_[step][i] = pack<T>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
    }
  }

  // O += P V. V lies as [key, column]; 16 keys are two groups of 8 lines.
  __device__ __forceinline__ void multiply_values(const unsigned char* v) {
    const std::uint64_t values =
        gpu::wgmma_descriptor(v, gpu::Swizzle::b128, Tile::kBoxBytes, 1024);
#pragma unroll
    for (int step = 0; step < kBlockKeys / 16; ++step) {
      gpu::wgmma_rs_m64k16<T, Tile::kDim, true>(o_, p_[step],
                                                gpu::wgmma_behind(values, step * 2048), true);
    }
  }
  __device__ __forceinline__ void hold() { gpu::wgmma_hold(o_); }
  __device__ __forceinline__ void collect() {}
  __device__ __forceinline__ float& sum(int i) { return o_[i]; }

 private:
  Queries<T, Tile> queries_;
  float o_[Tile::kDim / 2];
  std::uint32_t p_[kBlockKeys / 16][4];
};

}  // namespace specdec::attention::hopper
