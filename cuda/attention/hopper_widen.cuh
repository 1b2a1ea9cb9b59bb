// e4m3 K and V for the Hopper family's kernel: seven warps of the loading warpgroups turn the tiles
// that the first one has the copy engine bring into tiles of the queries' 16-bit type, swizzled as
// the engine would. Keys that do not belong to the unit become zeros on the way.
#pragma once

#include <cstdint>

#include "attention/elements.cuh"
#include "attention/hopper_load.cuh"

namespace specdec::attention::hopper {

// One tile, shared out among the threads of the widening warps. Returns whether it met a NaN.
template <class T, class Tile>
__device__ __forceinline__ bool widen_tile(const unsigned char* raw, unsigned char* tile,
                                           const UnitKeys& keys, std::int32_t block) {
  constexpr unsigned kRowVectors = Tile::kDim / 16;  // 16 numbers each: 16 bytes in, 32 out
  constexpr unsigned kVectors = kBlockKeys * kRowVectors, kThreads = 32 * kTurningWarps<Tile>;
  // Vectors of a thread that are read before the first is widened: shared memory's latency is that
  // of many instructions, and a scheduler has two such warps.
  constexpr unsigned kAhead = kVectors > 2 * kThreads ? 3 : 2;
  const bool partial = keys.is_partial(block);
  std::uint32_t nan = 0;
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
      nan |= e4m3_nan(in[k].x) | e4m3_nan(in[k].y) | e4m3_nan(in[k].z) | e4m3_nan(in[k].w);
      const uint2 a = widen_e4m3<T>(in[k].x), b = widen_e4m3<T>(in[k].y);
      const uint2 c = widen_e4m3<T>(in[k].z), d = widen_e4m3<T>(in[k].w);
      uint4* line =
          reinterpret_cast<uint4*>(tile + column / Tile::kBoxColumns * Tile::kBoxBytes) + row * 8;
      const unsigned chunk = column % Tile::kBoxColumns / 8;
      line[chunk ^ (row & 7)] = make_uint4(a.x, a.y, b.x, b.y);
      line[(chunk + 1) ^ (row & 7)] = make_uint4(c.x, c.y, d.x, d.y);
    }
  }
  return nan != 0;
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
    const Job job = work.jobs[unit.job];
    const UnitKeys keys(job, unit);
    bool nan = false;
    for (std::int32_t block = keys.first_block(); block < keys.end_block(); ++block) {
      const auto widen = [&](const unsigned char* raw, std::uint64_t* raw_full,
                             std::uint64_t* raw_empty, unsigned char* tile, std::uint64_t* full,
                             std::uint64_t* empty) {
        gpu::mbarrier_wait(raw_full, from.round);
        gpu::mbarrier_wait(empty, to.round ^ 1);
        const bool found = widen_tile<T, Tile>(raw, tile, keys, block);
        nan = nan || found;
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
    if (nan) atomicOr(work.request_flags + job.request, static_cast<std::uint32_t>(kStatusNaN));
  }
}

}  // namespace specdec::attention::hopper
