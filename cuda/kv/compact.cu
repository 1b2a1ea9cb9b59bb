// K/V of accepted draft rows to their final slots, all layers in one launch: slot kv_len + path[i]
// -> slot kv_len + 1 + i.
//
// Grid      (columns of a request / block, requests). A thread owns one column: up to 16 bytes at a
//           fixed place of every token, of one layer, of K or V, of one KV head. It alone reads and
//           writes them, so threads need not wait for each other: the moves of a column are safe in
//           the thread's own order. path increases, so path[i] >= 1 + i: a batch that is loaded
//           before it is stored overwrites no slot that a later batch reads.
// Shared    the block's list of moves, byte offsets from and to, at most 127. Leading nodes that
//           are in place are not listed; a chain has an empty list and the block returns.
// Bytes     2 * moves * layers * 2 * G * K * size. Eight accepted nodes out of place, B = 8, 32
//           layers, G = 8, K = 128, 16 bits: 17 MB read and 17 MB written, 65,536 threads with 8
//           independent loads of 16 bytes each in flight: limited by the bytes. Skipped: launch and
//           three dependent loads.
#include <algorithm>

#include "gpu/gpu.cuh"
#include "kv/elements.cuh"
#include "kv/kv.h"
#include "step/step_rows.cuh"

namespace specdec::cuda {
namespace {

constexpr int kCompactThreads = 256;
constexpr int kBatch = 8;

struct Moves {
  std::int64_t from[kMaxStepTokens], to[kMaxStepTokens];  // bytes from the start of a layer
};

// What is wrong with the request's path; 0: nothing. Fills the moves of the nodes in [skip, n).
__device__ std::uint32_t list_moves(const CompactKvParams& p, int element_bytes, int b,
                                    const RequestRows& rows, int n, int skip, Moves& moves) {
  const std::int32_t* path = p.path + std::int64_t{b} * kMaxStepTokens;
  const int shift = page_shift(p.cache.page_size);
  std::uint32_t flags = 0;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kCompactThreads) {
    const std::int32_t node = path[i], previous = i == 0 ? 0 : path[i - 1];
    if (node <= previous || node >= rows.count) {
      flags |= kStatusBadTree;
      continue;
    }
    if (i < skip) continue;
    const std::int32_t from = rows.kv_len + node, to = rows.kv_len + 1 + i;
    const std::int32_t from_page = page_of(p.step, b, from, shift, p.cache.num_pages);
    const std::int32_t to_page = page_of(p.step, b, to, shift, p.cache.num_pages);
    if (from_page < 0 || to_page < 0) {
      flags |= kStatusBadPage;
      continue;
    }
    moves.from[i - skip] = slot_elements(p.cache, 0, from_page, from) * element_bytes;
    moves.to[i - skip] = slot_elements(p.cache, 0, to_page, to) * element_bytes;
  }
  return flags;
}

template <class Word>
__device__ __forceinline__ void move_column(char* column, const Moves& moves, int count) {
  for (int first = 0; first < count; first += kBatch) {
    Word held[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < count)
        held[i] = *reinterpret_cast<const Word*>(column + moves.from[first + i]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < count) *reinterpret_cast<Word*>(column + moves.to[first + i]) = held[i];
    }
  }
}

template <class Word>
__global__ void __launch_bounds__(kCompactThreads)
    compact_kernel(const CompactKvParams p, const int element_bytes) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int b = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  const int n = p.path_len[b];
  if (n == 0) return;
  const RequestRows rows = request_rows(p.step, b, p.cache.page_size);
  if (!rows.valid || n < 0 || n >= rows.count || n > kMaxDraftLen) {
    if (blockIdx.x == 0 && thread == 0) {
      report(p.exec.status, b, rows.valid ? kStatusBadTree : kStatusBadLength);
    }
    return;
  }
  // The path increases: the nodes before the first one out of place are in place.
  const std::int32_t* path = p.path + std::int64_t{b} * kMaxStepTokens;
  const int skip = __syncthreads_count(thread < n && path[thread] == thread + 1 ? 1 : 0);
  Moves& moves = *gpu::dynamic_shared<Moves>();
  const std::uint32_t flags = list_moves(p, element_bytes, b, rows, n, skip, moves);
  if (blockIdx.x == 0) report(p.exec.status, b, flags);
  if (__syncthreads_or(flags != 0 ? 1 : 0) != 0 || skip == n) return;

  const int words_per_head = p.cache.head_dim * element_bytes / static_cast<int>(sizeof(Word));
  int column = static_cast<int>(blockIdx.x) * kCompactThreads + thread;
  const int word = column % words_per_head;
  column /= words_per_head;
  const int head = column % p.cache.num_kv_heads;
  column /= p.cache.num_kv_heads;
  const bool is_v = column % 2 != 0;
  const int layer = column / 2;
  if (layer >= p.cache.num_layers) return;
  char* pages = static_cast<char*>(is_v ? p.cache.v : p.cache.k);
  const std::int64_t at = layer * p.cache.stride_layer + head * p.cache.stride_head;
  move_column<Word>(pages + at * element_bytes + word * sizeof(Word), moves, n - skip);
}

template <class Word>
void launch_compact(const CompactKvParams& p, int element_bytes) {
  const std::int64_t columns = std::int64_t{2} * p.cache.num_layers * p.cache.num_kv_heads *
                               (p.cache.head_dim * element_bytes / static_cast<int>(sizeof(Word)));
  const dim3 grid(static_cast<unsigned>((columns + kCompactThreads - 1) / kCompactThreads),
                  static_cast<unsigned>(p.step.num_requests));
  gpu::launch(compact_kernel<Word>, grid, dim3(kCompactThreads), sizeof(Moves), p.exec.stream,
              gpu::LaunchOptions{.dependent = true}, p, element_bytes);
}

// The widest access that divides a head and every address.
std::int64_t widest_word(const KvCacheView& cache) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  std::int64_t width = 16;
  const std::int64_t multiples[] = {
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(cache.k) % 16),
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(cache.v) % 16),
      cache.head_dim * bytes,
      cache.stride_layer * bytes,
      cache.stride_page * bytes,
      cache.stride_head * bytes,
      cache.stride_token * bytes};
  for (const std::int64_t multiple : multiples) {
    while (multiple % width != 0) width /= 2;
  }
  return width;
}

}  // namespace

void compact_kv(const CompactKvParams& p) {
  if (p.step.num_requests == 0 || p.cache.num_layers == 0) return;
  const int element_bytes = static_cast<int>(dtype_bytes(p.cache.dtype));
  switch (widest_word(p.cache)) {
    case 16:
      return launch_compact<uint4>(p, element_bytes);
    case 8:
      return launch_compact<uint2>(p, element_bytes);
    case 4:
      return launch_compact<std::uint32_t>(p, element_bytes);
    case 2:
      return launch_compact<std::uint16_t>(p, element_bytes);
    default:
      return launch_compact<std::uint8_t>(p, element_bytes);
  }
}

}  // namespace specdec::cuda
