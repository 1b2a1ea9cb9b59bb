// The loading side of the Hopper family's kernel: brings K and V of a block's units into a ring of
// stages, 64 keys at a time, by the bulk tensor copy engine. hopper_widen.cuh follows it if they
// are e4m3.
//
// A page, or 64 keys of a longer one, is one box of each 64 columns. Pages are looked up 32 ahead
// of use by the lanes of the loading warp. A page of which no key is wanted is not read: its box is
// put outside of the tensor, from where the engine brings zeros. So is one whose id is outside the
// pool, and the request is flagged.
//
// Keys of a wanted page on which no row of the job may look (before the job's first, past its last,
// behind its sink tokens) hold anything, NaN included. Their scores are replaced, but 0 * NaN in P
// V would not be: a second warp zeroes them in V before the consumers see the tile.
#pragma once

#include <cstdint>

#include "attention/hopper_tile.h"
#include "attention/spec_attention.h"
#include "attention/unit_keys.cuh"
#include "gpu/hopper.cuh"

namespace specdec::attention::hopper {

// Warps of the loading warpgroups, all but the first, where they turn raw tiles into what consumers
// read.
template <class Tile>
inline constexpr int kTurningWarps = 4 * Tile::kLoaders - 1;

// Tiles that a block asks for before the queries are there. With a ring full of them the queries,
// which come by the same way, would be the last to arrive.
inline constexpr std::int32_t kTilesAhead = 3;

// A position in a ring of stages and the parity of how often the ring was walked.
template <int kStages>
struct Cursor {
  std::int32_t stage = 0;
  std::uint32_t round = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, round ^= 1;
  }
};

// Page ids of one unit in the lanes of a warp: this window of 32 pages and the next.
class PageWindow {
 public:
  __device__ __forceinline__ PageWindow(const AttentionLaunch& launch, std::int32_t request,
                                        const UnitKeys& keys)
      : table_(launch.call.step.page_table +
               static_cast<std::int64_t>(request) * launch.call.step.page_table_stride),
        flags_(launch.work.request_flags + request),
        num_pages_(launch.call.cache.num_pages),
        page_shift_(launch.page_shift),
        keys_(keys),
        window_((keys.first >> launch.page_shift) / 32),
        ids_(lookup(window_)),
        next_ids_(lookup(window_ + 1)) {}

  // The id of page `index` of the request, num_pages if there is nothing to read. All lanes call,
  // each with an index in the same window as the others', never below an earlier call's window.
  __device__ __forceinline__ std::int32_t id(std::int32_t index) {
    if (index / 32 != window_) {
      ++window_;
      ids_ = next_ids_;
      next_ids_ = lookup(window_ + 1);
    }
    return __shfl_sync(kAllLanes, ids_, index % 32);
  }

 private:
  __device__ __forceinline__ std::int32_t lookup(std::int32_t window) const {
    const std::int32_t index = window * 32 + static_cast<std::int32_t>(threadIdx.x % 32);
    if (!keys_.has_some(index << page_shift_, 1 << page_shift_)) return num_pages_;
    const std::int32_t id = table_[index];
    if (id >= 0 && id < num_pages_) return id;
    atomicOr(flags_, static_cast<std::uint32_t>(kStatusBadPage));
    return num_pages_;
  }

  const std::int32_t* table_;
  std::uint32_t* flags_;
  std::int32_t num_pages_, page_shift_;
  UnitKeys keys_;
  std::int32_t window_, ids_, next_ids_;
};

// One warp: fills the rings with the tiles of all units of the block, in order. A partial tile of V
// is announced at `landed` (may be v_ring.full) instead of v_ring.full.
template <class Tile, int kStages>
__device__ __forceinline__ void load_tiles(const AttentionLaunch& launch,
                                           const gpu::TensorMap& k_map, const gpu::TensorMap& v_map,
                                           unsigned char (&k)[kStages][Tile::kLoadBytes],
                                           HopperRing<kStages>& k_ring,
                                           unsigned char (&v)[kStages][Tile::kLoadBytes],
                                           HopperRing<kStages>& v_ring,
                                           std::uint64_t (&landed)[kStages]) {
  const WorkView& work = launch.work;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int page_size = 1 << launch.page_shift;
  const int box_keys = min(page_size, static_cast<int>(kBlockKeys));
  const int boxes_down = kBlockKeys / box_keys;  // pages of a block
  const int row = lane % boxes_down;             // of this lane's box in the tile
  const int column = lane / boxes_down;
  const int offset = (column * kBlockKeys + row * box_keys) * Tile::kLoadRowBytes;
  Cursor<kStages> at;
  std::int32_t ahead = kTilesAhead;
  for (std::int32_t u = work.block_begin[blockIdx.x]; u < work.block_begin[blockIdx.x + 1]; ++u) {
    const Unit unit = work.units[u];
    const Job job = work.jobs[unit.job];
    const std::int32_t kv_len = launch.call.step.kv_len[job.request];
    const UnitKeys keys(job, unit);
    PageWindow pages(launch, job.request, keys);
    for (std::int32_t block = keys.first_block(); block < keys.end_block(); ++block) {
      // For the step's own K and V, which the kernel before may append.
      gpu::grid_dependency_wait_if((block + 1) * kBlockKeys > kv_len || ahead-- == 0);
      const std::int32_t key = block * kBlockKeys + row * box_keys;
      const std::int32_t page = pages.id(key >> launch.page_shift);
      const std::int32_t in_page = key & (page_size - 1);
      const auto fill = [&](unsigned char* tile, const gpu::TensorMap& map, std::uint64_t* empty,
                            std::uint64_t* full) {
        gpu::mbarrier_wait(empty, at.round ^ 1);
        if (lane == 0) gpu::mbarrier_arrive_expect_tx(full, Tile::kLoadBytes);
        __syncwarp();
        if (column < Tile::kLoadBoxes) {
          gpu::tma_load_4d(tile + offset, map, full, column * Tile::kLoadColumns, in_page,
                           job.kv_head, page);
        }
      };
      fill(k[at.stage], k_map, &k_ring.empty[at.stage], &k_ring.full[at.stage]);
      fill(v[at.stage], v_map, &v_ring.empty[at.stage],
           keys.is_partial(block) ? &landed[at.stage] : &v_ring.full[at.stage]);
      at.advance();
    }
  }
}

// One warp: zeroes the keys of V tiles that do not belong to the unit, then hands the tile over.
template <class Tile>
__device__ __forceinline__ void clean_tiles(const AttentionLaunch& launch,
                                            HopperShared<Tile>& shared) {
  constexpr int kRowVectors = Tile::kBoxColumns * 2 / 16;
  const WorkView& work = launch.work;
  const int lane = static_cast<int>(threadIdx.x % 32);
  Cursor<Tile::kStages> at;
  std::uint32_t parities = 0;  // of the stages' v_landed: its phases end only for such tiles
  for (std::int32_t u = work.block_begin[blockIdx.x]; u < work.block_begin[blockIdx.x + 1]; ++u) {
    const Unit unit = work.units[u];
    const UnitKeys keys(work.jobs[unit.job], unit);
    for (std::int32_t block = keys.first_block(); block < keys.end_block(); ++block, at.advance()) {
      if (!keys.is_partial(block)) continue;
      gpu::mbarrier_wait(&shared.v_landed[at.stage], parities >> at.stage & 1);
      parities ^= 1u << at.stage;
      uint4* tile = reinterpret_cast<uint4*>(shared.v[at.stage]);
      for (int i = lane; i < Tile::kTileBytes / 16; i += 32) {
        const std::int32_t key = block * kBlockKeys + i / kRowVectors % kBlockKeys;
        if (!keys.has(key)) tile[i] = make_uint4(0, 0, 0, 0);
      }
      gpu::fence_proxy_async();
      __syncwarp();
      if (lane == 0) gpu::mbarrier_arrive(&shared.v_ready.full[at.stage]);
    }
  }
}

}  // namespace specdec::attention::hopper
