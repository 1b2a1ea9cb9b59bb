// e4m3 K and V for the Hopper family's kernel: seven warps of the loading warpgroups turn the tiles
// that the first one has the copy engine bring into tiles of the queries' 16-bit type, swizzled as
// the engine would. Keys that do not belong to the unit become zeros on the way.
#pragma once

#include <cstdint>

#include "attention/elements.cuh"
#include "attention/hopper_load.cuh"

namespace specdec::attention::hopper {

// Two e4m3 numbers as a pair of T, exactly: by way of float16, which takes a third of the integer
// instructions that moving bits takes (elements.cuh). A NaN stays one, and the rows that it reaches
// are flagged with their output.
template <class T>
__device__ __forceinline__ std::uint32_t convert_e4m3(std::uint32_t two) {
  const __half2 halves{
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3)};
  if constexpr (std::is_same_v<T, __half>) {
    return *reinterpret_cast<const std::uint32_t*>(&halves);
  } else {
    const float2 floats = __half22float2(halves);
    return pack<T>(floats.x, floats.y);
  }
}

// One tile, shared out among the threads of the widening warps.
template <class T, class Tile>
__device__ __forceinline__ void widen_tile(const unsigned char* raw, unsigned char* tile,
                                           const UnitKeys& keys, std::int32_t block) {
  constexpr unsigned kRowVectors = Tile::kDim / 16;  // 16 numbers each: 16 bytes in, 32 out
  constexpr unsigned kVectors = kBlockKeys * kRowVectors, kThreads = 32 * kTurningWarps<Tile>;
  // Vectors of a thread that are read before the first is widened: shared memory's latency is that
  // of many instructions, and a scheduler has two such warps.
  constexpr unsigned kAhead = kVectors > 2 * kThreads ? 3 : 2;
  const bool partial = keys.is_partial(block);
#pragma unroll 1
  for (unsigned first = threadIdx.x - 32; first < kVectors; first += kAhead * kThreads) {
    uint4 in[kAhead];
#pragma unroll
    for (unsigned k = 0; k < kAhead; ++k) {
      const unsigned i = first + k * kThreads;
      const int key = block * kBlockKeys + static_cast<int>(i / kRowVectors);
      in[k] = make_uint4(0, 0, 0, 0);
      if (i < kVectors && (!partial || keys.has(key)))
        in[k] = reinterpret_cast<const uint4*>(raw)[i];
    }
#pragma unroll
    for (unsigned k = 0; k < kAhead; ++k) {
      const unsigned i = first + k * kThreads;
      if (i >= kVectors) break;
      const unsigned row = i / kRowVectors, column = i % kRowVectors * 16;
      const std::uint32_t words[4] = {in[k].x, in[k].y, in[k].z, in[k].w};
      std::uint32_t out[8];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        out[2 * w] = convert_e4m3<T>(words[w] & 0xffffu);
        out[2 * w + 1] = convert_e4m3<T>(words[w] >> 16);
      }
      uint4* line =
          reinterpret_cast<uint4*>(tile + column / Tile::kBoxColumns * Tile::kBoxBytes) + row * 8;
      const unsigned chunk = column % Tile::kBoxColumns / 8;
      line[chunk ^ (row & 7)] = make_uint4(out[0], out[1], out[2], out[3]);
      line[(chunk + 1) ^ (row & 7)] = make_uint4(out[4], out[5], out[6], out[7]);
    }
  }
}

// The widening warps: raw tiles to tiles, for all units of the block, in order.
template <class T, class Tile>
__device__ __forceinline__ void widen_tiles(const AttentionLaunch& launch,
                                            HopperShared<Tile>& shared) {
  const WorkView& work = launch.work;
  const int lane = static_cast<int>(threadIdx.x % 32);
  Cursor<Tile::kLoadStages> from;
  Cursor<Tile::kStages> to;
  for (std::int32_t u = work.block_begin[blockIdx.x]; u < work.block_begin[blockIdx.x + 1]; ++u) {
    const Unit unit = work.units[u];
    const UnitKeys keys(work.jobs[unit.job], unit);
    for (std::int32_t block = keys.first_block(); block < keys.end_block(); ++block) {
      const auto widen = [&](const unsigned char* raw, std::uint64_t* raw_full,
                             std::uint64_t* raw_empty, unsigned char* tile, std::uint64_t* full,
                             std::uint64_t* empty) {
        gpu::mbarrier_wait(raw_full, from.round);
        gpu::mbarrier_wait(empty, to.round ^ 1);
        widen_tile<T, Tile>(raw, tile, keys, block);
        gpu::fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
          gpu::mbarrier_arrive(full);
          gpu::mbarrier_arrive(raw_empty);
        }
      };
      widen(shared.raw_k[from.stage], &shared.k_raw.full[from.stage],
            &shared.k_raw.empty[from.stage], shared.k[to.stage], &shared.k_ready.full[to.stage],
            &shared.k_ready.empty[to.stage]);
      widen(shared.raw_v[from.stage], &shared.v_raw.full[from.stage],
            &shared.v_raw.empty[from.stage], shared.v[to.stage], &shared.v_ready.full[to.stage],
            &shared.v_ready.empty[to.stage]);
      from.advance();
      to.advance();
    }
  }
}

}  // namespace specdec::attention::hopper
