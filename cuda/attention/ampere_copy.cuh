// How an Ampere block brings queries, keys and values into its shared memory.
#pragma once

#include <cstdint>

#include "attention/ampere_config.cuh"
#include "attention/elements.cuh"
#include "attention/rows.cuh"
#include "attention/unit_keys.cuh"

namespace specdec::attention {

// All lanes of the block meet; a block of one warp needs no more than a warp's barrier.
template <class Config>
__device__ __forceinline__ void sync_block() {
  if constexpr (Config::kWarps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// The rows of one job: a range of a request's (token, head of the group) rows.
struct JobRows {
  RequestView request;
  std::int32_t kv_head, begin, end;

  __device__ __forceinline__ JobRows(const AttentionLaunch& launch, const Job& job)
      : request(request_view(launch.call.step, job.request)), kv_head(job.kv_head) {
    begin = job.row_block * launch.row_tile;
    end = request.rows * launch.group;
  }
};

// Starts copying the job's queries; rows past the request's last are zero.
template <class Config>
__device__ __forceinline__ void copy_queries(const AttentionLaunch& launch, const JobRows& rows,
                                             unsigned char* to) {
  using T = typename Config::T;
  const SpecAttentionParams& call = launch.call;
  const T* q = static_cast<const T*>(call.q);
  for (int c = threadIdx.x; c < Config::kRowTile * Config::kRowChunks; c += Config::kThreads) {
    const int row = c / Config::kRowChunks, chunk = c % Config::kRowChunks;
    const std::int32_t r = rows.begin + row;
    const T* from = q;
    if (r < rows.end) {
      const std::int32_t token = r / launch.group;
      const std::int32_t head = rows.kv_head * launch.group + r - token * launch.group;
      from += (rows.request.first_row + token) * call.q_row_stride + head * Config::kHeadDim +
              chunk * 8;
    }
    gpu::cp_async_16(to + Config::swizzle(row, chunk), from, r < rows.end);
  }
}

// Copies of one unit's key blocks, in the order K0 V0 K1 V1 ...
template <class Config>
struct KeyCopier {
  using T = typename Config::T;
  using Kv = typename Config::Kv;
  static constexpr int kChunkElements = 16 / sizeof(Kv);
  static constexpr int kRowChunks = Config::kHeadDim / kChunkElements;
  static constexpr int kChunks = Config::kKeys * kRowChunks;

  const AttentionLaunch& launch;
  unsigned char* smem;
  std::int64_t* groups;
  const std::int32_t* pages;
  std::int64_t head_offset;
  UnitKeys keys;
  bool bad_page = false;
  std::uint32_t nan = 0;  // e4m3_nan() of all that was widened

  __device__ __forceinline__ KeyCopier(const AttentionLaunch& launch, const Job& job,
                                       const Unit& unit, unsigned char* smem)
      : launch(launch),
        smem(smem),
        groups(reinterpret_cast<std::int64_t*>(smem + Config::kGroupOffset)),
        pages(launch.call.step.page_table +
              static_cast<std::int64_t>(job.request) * launch.call.step.page_table_stride),
        head_offset(job.kv_head * launch.call.cache.stride_head),
        keys(job, unit) {}

  // Looks up where the keys of the window that begins with `block` lie; -1: nowhere.
  __device__ __forceinline__ void look_up(std::int32_t block) {
    const KvCacheView& cache = launch.call.cache;
    for (int i = threadIdx.x; i < Config::kGroups; i += Config::kThreads) {
      const std::int32_t slot = block * Config::kKeys + i * Config::kGroupKeys;
      std::int64_t offset = -1;
      if (keys.has_some(slot, Config::kGroupKeys)) {
        const std::int32_t page = pages[slot >> launch.page_shift];
        if (page >= 0 && page < cache.num_pages) {
          const std::int32_t in_page = slot & (cache.page_size - 1);
          offset = page * cache.stride_page + in_page * cache.stride_token + head_offset;
        } else {
          bad_page = true;
        }
      }
      groups[i] = offset;
    }
    sync_block<Config>();
  }

  // Starts copying the keys (or values) of a block into one stage; those that are not the unit's
  // become zero, for what lies there may be anything, and 0 * NaN is NaN.
  __device__ __forceinline__ void copy(const void* pool, std::int32_t block, bool values) {
    const Kv* from = static_cast<const Kv*>(pool);
    const int stage = block % Config::kStages;
    unsigned char* to = Config::kWiden
                            ? smem + Config::kRawOffset + (stage * 2 + values) * Config::kRawBytes
                            : smem + (values ? Config::kValueOffset : Config::kKeyOffset) +
                                  stage * Config::kTileBytes;
    const std::int64_t* block_groups =
        groups + block % Config::kWindowBlocks * (Config::kKeys / Config::kGroupKeys);
    const std::int64_t stride = launch.call.cache.stride_token;
    // In rows of the tile.
    const std::int32_t begin_row = keys.begin - block * Config::kKeys;
    const std::int32_t sink_rows = keys.sink_end - block * Config::kKeys;
    const auto num_rows = static_cast<std::uint32_t>(keys.end - keys.begin);
    const auto copy_chunk = [&](int c, std::int64_t offset) {
      const int row = c / kRowChunks, chunk = c % kRowChunks;
      const bool inside = static_cast<std::uint32_t>(row - begin_row) < num_rows || row < sink_rows;
      const bool valid = offset >= 0 && inside;
      const Kv* source =
          from + (valid ? offset + row % Config::kGroupKeys * stride + chunk * kChunkElements : 0);
      unsigned char* place = to + (Config::kWiden ? c * 16 : Config::swizzle(row, chunk));
      gpu::cp_async_16(place, source, valid);
    };
    constexpr int kGroupChunks = Config::kGroupKeys * kRowChunks;
    if constexpr (kGroupChunks % Config::kThreads == 0) {  // all threads are in the same group
#pragma unroll Config::kCopyUnroll
      for (int group = 0; group < kChunks / kGroupChunks; ++group) {
        const std::int64_t offset = block_groups[group];
#pragma unroll Config::kCopyUnroll
        for (int c = 0; c < kGroupChunks; c += Config::kThreads) {
          copy_chunk(group * kGroupChunks + c + static_cast<int>(threadIdx.x), offset);
        }
      }
    } else {
#pragma unroll Config::kCopyUnroll
      for (int begin = 0; begin < kChunks; begin += Config::kThreads) {
        const int c = begin + static_cast<int>(threadIdx.x);
        if (kChunks % Config::kThreads != 0 && c >= kChunks) break;
        copy_chunk(c, block_groups[c / kGroupChunks]);
      }
    }
  }

  // Both commit, a block beyond `end_block` as an empty group, so that groups count blocks.
  __device__ __forceinline__ void start_keys(std::int32_t block, std::int32_t end_block,
                                             bool first) {
    if (block < end_block) {
      if (first || block % Config::kWindowBlocks == 0) {
        look_up(block / Config::kWindowBlocks * Config::kWindowBlocks);
      }
      copy(launch.k, block, false);
    }
    gpu::cp_async_commit();
  }
  __device__ __forceinline__ void start_values(std::int32_t block, std::int32_t end_block) {
    if (block < end_block) copy(launch.v, block, true);
    gpu::cp_async_commit();
  }

  // The operand tile of a block that has arrived. From e4m3 pages it is widened first: each thread
  // takes the chunks that it copied itself, so a wait is all that lies between.
  __device__ __forceinline__ const unsigned char* operand(std::int32_t block, bool values) {
    unsigned char* tile = smem + (values ? Config::kValueOffset : Config::kKeyOffset);
    if constexpr (!Config::kWiden) {
      return tile + block % Config::kStages * Config::kTileBytes;
    } else {
      const unsigned char* raw =
          smem + Config::kRawOffset + (block % Config::kStages * 2 + values) * Config::kRawBytes;
#pragma unroll 2
      for (int c = threadIdx.x; c < kChunks; c += Config::kThreads) {
        const int row = c / kRowChunks, chunk = c % kRowChunks * 2;
        const uint4 in = *reinterpret_cast<const uint4*>(raw + c * 16);
        nan |= e4m3_nan(in.x) | e4m3_nan(in.y) | e4m3_nan(in.z) | e4m3_nan(in.w);
        const uint2 a = widen_e4m3<T>(in.x), b = widen_e4m3<T>(in.y);
        const uint2 d = widen_e4m3<T>(in.z), e = widen_e4m3<T>(in.w);
        *reinterpret_cast<uint4*>(tile + Config::swizzle(row, chunk)) =
            make_uint4(a.x, a.y, b.x, b.y);
        *reinterpret_cast<uint4*>(tile + Config::swizzle(row, chunk + 1)) =
            make_uint4(d.x, d.y, e.x, e.y);
      }
      return tile;
    }
  }

  // Once per unit: tells of what was found wrong with the request.
  __device__ __forceinline__ void report(std::int32_t request) const {
    const std::uint32_t flags = (bad_page ? kStatusBadPage : 0u) | (nan != 0 ? kStatusNaN : 0u);
    if (flags != 0) atomicOr(&launch.work.request_flags[request], flags);
  }
};

}  // namespace specdec::attention
