// Main pass of speculative attention for compute capability 8.0 and later: mma.sync + cp.async.
//
// grid     persistent blocks; block i walks units [block_begin[i], block_begin[i + 1])
// block    one warp per 16 rows of the row tile; every warp takes all 64 keys of a key block
// order    per key block: wait K, S = Q K^T, mask, softmax, wait V, O += P V. Copies run kStages
//          blocks ahead, those of V half a block behind those of K; two barriers per key block.
// states   per chunk {m, l, O} in registers; a unit that starts its job folds its chunks on chip
// limit    memory below about M*G = 100 rows per K/V read, the mma.sync rate above
//
// A row's bits depend on its warp's instructions alone, which are the same for every tile size.
#pragma once

#include <cstdint>

#include "attention/ampere_copy.cuh"
#include "attention/output.cuh"
#include "attention/softmax.cuh"

namespace specdec::attention {

// Row g + 8i of its warp's sixteen is a thread's row i; this is its place in the tile.
__device__ __forceinline__ int thread_row(int i) {
  return static_cast<int>(threadIdx.x >> 5) * 16 + static_cast<int>(threadIdx.x & 31) / 4 + i * 8;
}

// The keys that no row of the warp needs a mask for. What a row itself sees is worked out again in
// the few blocks that do: registers are dearer.
struct PlainKeys {
  std::int32_t begin = 0, end = INT32_MAX;

  __device__ __forceinline__ PlainKeys(const AttentionLaunch& launch, const JobRows& rows) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int32_t r = rows.begin + thread_row(i);
      if (r >= rows.end) continue;
      const RowSlots slots = row_slots(launch, rows.request, r / launch.group);
      begin = max(begin, slots.begin);
      end = min(end, slots.end);
    }
    begin = __reduce_max_sync(kAllLanes, begin);
    end = __reduce_min_sync(kAllLanes, end);
  }

  __device__ __forceinline__ bool has_block(std::int32_t first_slot) const {
    return first_slot >= begin && first_slot + kBlockKeys <= end;
  }
};

// Scores of keys that a row does not see become -inf. Rows that the request does not have see all.
__device__ __forceinline__ void mask_scores(const AttentionLaunch& launch, const JobRows& rows,
                                            std::int32_t first_slot, float (&s)[8][4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::int32_t r = rows.begin + thread_row(i);
    if (r >= rows.end) continue;
    const std::int32_t token = r / launch.group;
    const std::uint64_t visible =
        visible_slots(row_slots(launch, rows.request, token), rows.request.kv_len,
                      launch.call.sink_tokens, first_slot) >>
        (threadIdx.x % 4 * 2);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if ((visible >> (n * 8) & 1) == 0) s[n][2 * i] = empty_max();
      if ((visible >> (n * 8 + 1) & 1) == 0) s[n][2 * i + 1] = empty_max();
    }
  }
}

// Where a lane's ldmatrix addresses begin in a tile. Rows and chunks are added as constants: the
// permutation has a period of 8 rows, and an even number of chunks changes it by an exclusive or.
template <class Config>
struct LanePlace {
  const unsigned char* row;
  int chunk;

  __device__ __forceinline__ LanePlace(const unsigned char* tile, int first_row, int odd_chunk)
      : row(tile + first_row * Config::kRowBytes),
        chunk(odd_chunk ^ Config::permutation(first_row)) {}

  __device__ __forceinline__ const unsigned char* at(int rows, int chunks) const {
    constexpr int kInside = Config::kFold - 1;
    return row + rows * Config::kRowBytes +
           ((chunk ^ (chunks & kInside)) + (chunks & ~kInside)) * 16;
  }
};

// S = Q K^T of a warp's 16 rows and a block's 64 keys, head dim ascending.
template <class Config>
__device__ __forceinline__ void multiply_keys(const unsigned char* q, const unsigned char* k,
                                              float (&s)[8][4]) {
  const int lane = static_cast<int>(threadIdx.x & 31), warp = static_cast<int>(threadIdx.x >> 5);
  const LanePlace<Config> queries(q, warp * 16 + lane % 16, lane / 16);
  const LanePlace<Config> keys(k, lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int n = 0; n < 8; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) {
    std::uint32_t a[4];
    gpu::ldmatrix_x4(a, queries.at(0, step * 2));
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      std::uint32_t b[4];
      gpu::ldmatrix_x4(b, keys.at(n * 8, step * 2));
      gpu::mma_m16n8k16<typename Config::T>(s[n], a, b[0], b[1]);
      gpu::mma_m16n8k16<typename Config::T>(s[n + 1], a, b[2], b[3]);
    }
  }
}

// O += P V, keys ascending.
template <class Config>
__device__ __forceinline__ void multiply_values(const float (&p)[8][4], const unsigned char* v,
                                                float (&o)[Config::kHeadDim / 8][4]) {
  using T = typename Config::T;
  const int lane = static_cast<int>(threadIdx.x & 31);
  const LanePlace<Config> values(v, lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const std::uint32_t a[4] = {pack<T>(p[2 * step][0], p[2 * step][1]),
                                pack<T>(p[2 * step][2], p[2 * step][3]),
                                pack<T>(p[2 * step + 1][0], p[2 * step + 1][1]),
                                pack<T>(p[2 * step + 1][2], p[2 * step + 1][3])};
#pragma unroll
    for (int n = 0; n < Config::kHeadDim / 8; n += 2) {
      std::uint32_t b[4];
      gpu::ldmatrix_x4_trans(b, values.at(step * 16, n));
      gpu::mma_m16n8k16<T>(o[n], a, b[0], b[1]);
      gpu::mma_m16n8k16<T>(o[n + 1], a, b[2], b[3]);
    }
  }
}

// The state of a thread's two rows: l is its own share inside a chunk, the row's sum in a total.
template <class Config>
struct ThreadState {
  static constexpr int kTiles = Config::kHeadDim / 8;
  float m[2], l[2], o[kTiles][4];

  __device__ __forceinline__ void clear() {
    m[0] = m[1] = empty_max();
    l[0] = l[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
  }
};

// A slot's places as this thread sees them.
template <class Config>
struct ThreadSlot {
  static constexpr int kTiles = Config::kHeadDim / 8;
  float2* ml[2];
  float2* o[2];
  bool real[2];

  __device__ __forceinline__ ThreadSlot(const AttentionLaunch& launch, const JobRows& rows,
                                        std::int32_t slot) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int64_t row = std::int64_t{slot} * Config::kRowTile + thread_row(i);
      ml[i] = reinterpret_cast<float2*>(launch.work.state_ml) + row;
      o[i] =
          reinterpret_cast<float2*>(launch.work.state_o + row * Config::kHeadDim) + threadIdx.x % 4;
      real[i] = rows.begin + thread_row(i) < rows.end;
    }
  }

  __device__ __forceinline__ void store(const float (&m)[2], const float (&l)[2],
                                        const float (&sums)[kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!real[i]) continue;
      if (threadIdx.x % 4 == 0) *ml[i] = make_float2(m[i], l[i]);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        o[i][n * 4] = make_float2(sums[n][2 * i], sums[n][2 * i + 1]);
      }
    }
  }

  // sums = merge(what store() left here, sums).
  __device__ __forceinline__ void merge_into(const MergeWeights (&w)[2],
                                             float (&sums)[kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!real[i]) continue;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float2 total = o[i][n * 4];
        sums[n][2 * i] = merge(w[i], total.x, sums[n][2 * i]);
        sums[n][2 * i + 1] = merge(w[i], total.y, sums[n][2 * i + 1]);
      }
    }
  }
};

// The running total of a unit, and where its states go. Empty between units, unless one hands it
// on.
template <class Config>
struct UnitTotal {
  static constexpr int kTiles = Config::kHeadDim / 8;
  UnitStates states;
  std::int32_t slot;
  bool begun = false;  // does the total hold a chunk?
  float m[2], l[2];
  float o[Config::kTotalInRegisters ? kTiles : 1][4];

  __device__ __forceinline__ void begin(const Unit& unit) {
    states = unit.states;
    slot = unit.slot;
  }

  __device__ __forceinline__ void clear() {
    m[0] = m[1] = empty_max();
    l[0] = l[1] = 0.0f;
    if constexpr (Config::kTotalInRegisters) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    }
  }

  // Leaves the total; of a whole job in fast mode its output. The job is looked up again: registers
  // are dearer.
  __device__ __forceinline__ void leave(const AttentionLaunch& launch, std::int32_t unit,
                                        const ThreadSlot<Config>& place,
                                        const float (&sums)[kTiles][4]) const {
    const Job& job = launch.work.jobs[launch.work.units[unit].job];
    if (!main_writes(launch, job.num_slots)) return place.store(m, l, sums);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      write_fragment_row<typename Config::T, Config::kHeadDim>(
          launch, job, thread_row(i), m[i], l[i],
          [&](int n) { return make_float2(sums[n][2 * i], sums[n][2 * i + 1]); });
    }
  }

  // Takes a finished chunk in and empties it; `last`: of the unit, the launch's `unit`.
  __device__ __forceinline__ void take(const AttentionLaunch& launch, std::int32_t unit,
                                       const JobRows& rows, ThreadState<Config>& chunk, bool last) {
    const ThreadSlot<Config> place(launch, rows, slot);
    const bool leaves = states == UnitStates::kOnePerChunk || (last && states == UnitStates::kOne);
    MergeWeights w[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      w[i] = merge_max(m[i], chunk.m[i]);
      l[i] = merge(w[i], l[i], gpu::quad_sum(chunk.l[i]));
    }
    if constexpr (Config::kTotalInRegisters) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][e] = merge(w[e / 2], o[n][e], chunk.o[n][e]);
      }
      if (leaves) leave(launch, unit, place, o);
    } else {
      if (begun) place.merge_into(w, chunk.o);
      if (leaves) {
        leave(launch, unit, place, chunk.o);
      } else {
        place.store(m, l, chunk.o);
      }
      begun = !leaves;
    }
    if (leaves) {
      clear();
      ++slot;
    }
    chunk.clear();
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    ampere_main(const __grid_constant__ AttentionLaunch launch) {
  unsigned char* smem = gpu::dynamic_shared<unsigned char>();
  unsigned char* q = smem + Config::kQueryOffset;
  gpu::grid_dependency_wait();
  gpu::launch_dependents();

  UnitTotal<Config> total;
  total.clear();
  const std::int32_t end_unit = launch.work.block_begin[blockIdx.x + 1];
  for (std::int32_t u = launch.work.block_begin[blockIdx.x]; u < end_unit; ++u) {
    const Unit unit = launch.work.units[u];
    const Job job = launch.work.jobs[unit.job];
    const JobRows rows(launch, job);
    const PlainKeys plain(launch, rows);
    const ScoreScale scale = {score_scale(launch.call, job.kv_head), launch.call.softcap};
    KeyCopier<Config> copier(launch, job, unit, smem);
    const std::int32_t first_block = copier.keys.first_block();
    const std::int32_t end_block = copier.keys.end_block();

    copy_queries<Config>(launch, rows, q);
#pragma unroll
    for (int i = 0; i < Config::kStages; ++i) {
      if (i > 0) copier.start_values(first_block + i - 1, end_block);
      copier.start_keys(first_block + i, end_block, i == 0);
    }

    total.begin(unit);
    ThreadState<Config> chunk;
    chunk.clear();
    std::int32_t chunk_index = unit.first_chunk;
    for (std::int32_t block = first_block; block < end_block; ++block) {
      float s[8][4];
      gpu::cp_async_wait<2 * Config::kStages - 2>();
      const unsigned char* k = copier.operand(block, false);
      sync_block<Config>();  // K is there, and everybody is done with the values before
      copier.start_values(block + Config::kStages - 1, end_block);
      multiply_keys<Config>(q, k, s);

      if (scale.mapped) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[n][e] = scale.map(s[n][e]);
        }
      }
      const std::int32_t first_slot = block * Config::kKeys;
      if (!plain.has_block(first_slot)) mask_scores(launch, rows, first_slot, s);
      float decay[2];
      online_softmax(s, scale.factor, chunk.m, chunk.l, decay);
#pragma unroll
      for (int n = 0; n < Config::kHeadDim / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) chunk.o[n][e] *= decay[e / 2];
      }

      gpu::cp_async_wait<2 * Config::kStages - 2>();
      if constexpr (Config::kOneOperand) sync_block<Config>();  // the tile still holds K
      const unsigned char* v = copier.operand(block, true);
      sync_block<Config>();  // V is there, and everybody is done with the keys
      copier.start_keys(block + Config::kStages, end_block, false);
      multiply_values<Config>(s, v, chunk.o);
      if constexpr (Config::kOneOperand) sync_block<Config>();  // before K takes V's place

      const bool last = block + 1 == end_block;
      if (last || (block + 1) * Config::kKeys == chunk_begin(chunk_index + 1)) {
        total.take(launch, u, rows, chunk, last);
        ++chunk_index;
      }
    }
    copier.report(job.request);
    sync_block<Config>();  // before the next unit's queries and groups take their places
  }
}

template <class Config>
void launch_ampere(const AttentionLaunch& launch) {
  gpu::launch(ampere_main<Config>, dim3(launch.work.num_blocks), dim3(Config::kThreads),
              Config::kSmemBytes, launch.call.exec.stream, {.dependent = true}, launch);
}

}  // namespace specdec::attention
