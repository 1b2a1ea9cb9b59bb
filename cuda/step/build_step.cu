// Positions, ancestor masks, tree flags and cache slots of a step, from parents[]; and the packing
// of a boolean mask. What cpp/tree/draft_tree.h derives node by node is derived here for all nodes
// of a tree at once.
//
// build_step
//   Grid    (max_rows / 128, B + 1). One block owns a request of up to 128 rows, a thread a node;
//           longer chains are shared out by 128 rows. The blocks of the last column clear the rows
//           behind the last request.
//   Tree    pointer doubling: after round k a node holds the ancestor bits of its 2^k nearest
//           ancestors and itself, and the next one up. 7 rounds for 128 nodes of any shape, where a
//           walk to the root takes up to 127 dependent reads. The depth is the bit count less one.
//   Bytes   4 read and 4 + 16 + 8 written per row.
//   Limit   launch and the chain cu_rows -> parents -> rounds -> page table: a few microseconds.
// pack_mask
//   Grid    one warp for each word: lane j reads bit j's byte, a ballot is the word.
//   Bytes   cols + 4 num_words per row.
#include "gpu/gpu.cuh"
#include "step/step.h"
#include "step/step_rows.cuh"

namespace specdec::cuda {
namespace {

constexpr int kBuildThreads = kMaxStepTokens;
constexpr int kPackThreads = 256;

struct MaskRow {
  std::uint32_t words[kMaskWords];

  __device__ __forceinline__ void merge(const MaskRow& other) {
#pragma unroll
    for (int w = 0; w < kMaskWords; ++w) words[w] |= other.words[w];
  }
  __device__ __forceinline__ int count() const {
    int n = 0;
#pragma unroll
    for (int w = 0; w < kMaskWords; ++w) n += __popc(words[w]);
    return n;
  }
};

// Bits [0, n).
__device__ __forceinline__ MaskRow first_bits(int n) {
  MaskRow row;
#pragma unroll
  for (int w = 0; w < kMaskWords; ++w) {
    const int bits = n - 32 * w;
    row.words[w] = bits >= 32 ? ~0u : (bits <= 0 ? 0u : (1u << bits) - 1u);
  }
  return row;
}

struct TreeShared {
  std::int32_t ancestor[kMaxStepTokens];
  MaskRow mask[kMaxStepTokens];
};

// The ancestor bits of node `i`, whose parent is valid or -1. All threads of the block call it.
__device__ MaskRow ancestor_bits(TreeShared& shared, int i, std::int32_t parent) {
  MaskRow mine = {};
#pragma unroll
  for (int w = 0; w < kMaskWords; ++w) mine.words[w] = i / 32 == w ? 1u << (i % 32) : 0u;
  std::int32_t ancestor = parent;
  for (;;) {
    shared.ancestor[i] = ancestor;
    shared.mask[i] = mine;
    if (__syncthreads_or(ancestor >= 0 ? 1 : 0) == 0) return mine;
    if (ancestor >= 0) {
      mine.merge(shared.mask[ancestor]);
      ancestor = shared.ancestor[ancestor];
    }
    __syncthreads();
  }
}

__device__ __forceinline__ void write_row(const BuildStepParams& p, int row, std::int32_t position,
                                          const MaskRow& mask, std::int64_t slot) {
  p.positions[row] = position;
#pragma unroll
  for (int w = 0; w < kMaskWords; ++w) {
    p.mask[std::int64_t{row} * kMaskWords + w] = mask.words[w];
  }
  if (p.slots != nullptr) p.slots[row] = slot;
}

// Rows that belong to nobody: [begin, end), shared out over the blocks of a column.
__device__ __forceinline__ void clear_rows(const BuildStepParams& p, int begin, int end) {
  const int first = static_cast<int>(blockIdx.x * kBuildThreads + threadIdx.x);
  for (int row = begin + first; row < end; row += static_cast<int>(gridDim.x) * kBuildThreads) {
    write_row(p, row, 0, MaskRow{}, -1);
  }
}

// The pool's slot of a request's token; -1 and a flag if its page is bad.
__device__ __forceinline__ std::int64_t pool_slot(const BuildStepParams& p, int b,
                                                  std::int32_t token) {
  if (p.slots == nullptr) return -1;
  const std::int32_t page = page_of(p.step, b, token, page_shift(p.page_size), p.num_pages);
  if (page < 0) {
    report(p.exec.status, b, kStatusBadPage);
    return -1;
  }
  return std::int64_t{page} * p.page_size + (token & (p.page_size - 1));
}

__device__ void build_chain(const BuildStepParams& p, int b, const RequestRows& rows) {
  const int first = static_cast<int>(blockIdx.x * kBuildThreads + threadIdx.x);
  for (int i = first; i < rows.count; i += static_cast<int>(gridDim.x) * kBuildThreads) {
    if (p.step.parents[rows.first + i] != i - 1) report(p.exec.status, b, kStatusBadTree);
    write_row(p, rows.first + i, rows.kv_len + i, MaskRow{}, pool_slot(p, b, rows.kv_len + i));
  }
}

// A request that may be a tree, by the threads of one block.
__device__ void build_tree(const BuildStepParams& p, int b, const RequestRows& rows) {
  const int i = static_cast<int>(threadIdx.x);
  const bool real = i < rows.count;
  const std::int32_t parent = real ? p.step.parents[rows.first + i] : -1;
  const bool bad = real && (i == 0 ? parent != -1 : parent < 0 || parent >= i);
  const bool any_bad = __syncthreads_or(bad ? 1 : 0) != 0;
  bool tree = !any_bad && __syncthreads_or(real && parent != i - 1 ? 1 : 0) != 0;
  MaskRow mask = first_bits(i + 1);
  bool too_deep = false;
  if (tree) {
    const MaskRow ancestors = ancestor_bits(*gpu::dynamic_shared<TreeShared>(), i, parent);
    too_deep = __syncthreads_or(real && ancestors.count() - 1 > p.max_depth ? 1 : 0) != 0;
    tree = !too_deep;
    if (tree) mask = ancestors;
  }
  if (i == 0) {
    p.is_tree[b] = tree ? 1 : 0;
    if (any_bad || too_deep) report(p.exec.status, b, kStatusBadTree);
  }
  if (!real) return;
  write_row(p, rows.first + i, rows.kv_len + mask.count() - 1, mask,
            pool_slot(p, b, rows.kv_len + i));
}

__global__ void __launch_bounds__(kBuildThreads) build_step_kernel(const BuildStepParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int b = static_cast<int>(blockIdx.y);
  const std::int32_t begin = p.step.cu_rows[b];
  if (b == p.step.num_requests) return clear_rows(p, begin > 0 ? begin : 0, p.step.num_rows);
  const RequestRows rows = request_rows(p.step, b, p.page_size);
  if (rows.valid && rows.count > 0 && rows.count <= kMaxStepTokens) {
    if (blockIdx.x == 0) build_tree(p, b, rows);
    return;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    p.is_tree[b] = 0;
    if (!rows.valid) report(p.exec.status, b, kStatusBadLength);
  }
  if (rows.valid) return build_chain(p, b, rows);
  const std::int32_t end = p.step.cu_rows[b + 1];
  if (begin >= 0 && end <= p.step.num_rows) clear_rows(p, begin, end);
}

__global__ void __launch_bounds__(kPackThreads) pack_mask_kernel(const PackMaskParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const std::int64_t word =
      (std::int64_t{blockIdx.x} * kPackThreads + threadIdx.x) / 32;  // of all rows
  if (word >= std::int64_t{p.rows} * p.num_words) return;
  const std::int64_t row = word / p.num_words;
  const int column = static_cast<int>(word % p.num_words) * 32 + lane_id();
  const bool bit = column < p.cols && p.mask[row * p.row_stride + column * p.column_stride] != 0;
  const std::uint32_t bits = __ballot_sync(kAllLanes, bit);
  if (lane_id() == 0) p.words[word] = bits;
}

}  // namespace

void build_step(const BuildStepParams& p) {
  const int most_rows = p.step.max_rows > 1 ? p.step.max_rows : 1;
  const dim3 grid(static_cast<unsigned>((most_rows + kBuildThreads - 1) / kBuildThreads),
                  static_cast<unsigned>(p.step.num_requests + 1));
  gpu::launch(build_step_kernel, grid, dim3(kBuildThreads), sizeof(TreeShared), p.exec.stream,
              gpu::LaunchOptions{.dependent = true}, p);
}

void pack_mask(const PackMaskParams& p) {
  const std::int64_t threads = std::int64_t{p.rows} * p.num_words * 32;
  if (threads == 0) return;
  gpu::launch(pack_mask_kernel,
              dim3(static_cast<unsigned>((threads + kPackThreads - 1) / kPackThreads)),
              dim3(kPackThreads), 0, p.exec.stream, gpu::LaunchOptions{.dependent = true}, p);
}

}  // namespace specdec::cuda
