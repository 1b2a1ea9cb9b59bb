// Drafts of each request, made where its state lives, and packed into the arrays of the step.
//
// draft
//   Grid    one warp for each request. The tree is built in shared memory and copied to the slot.
//   Limit   latency: a chain of dependent reads of the slot (pool set, guesses, window), a few
//           hundred bytes for each request.
// gather
//   Grid    (B + 1) blocks; block b adds up the rows of the requests before it, which is a read of
//           at most B words and spares the pass that a scan over blocks would need, and copies its
//           own. The last block clears what no request uses.
#include "algo/slot.h"
#include "common/warp_team.cuh"
#include "gpu/gpu.cuh"
#include "step/step.h"
#include "step/step_rows.cuh"

namespace specdec::cuda {
namespace {

constexpr int kDraftThreads = 32;
constexpr int kGatherThreads = kMaxStepTokens;

__global__ void __launch_bounds__(kDraftThreads) draft_kernel(const DraftStepParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int b = static_cast<int>(blockIdx.x);
  const std::int32_t id = p.slot_ids[b];
  if (!p.slots.holds(id)) return;
  auto* tree = gpu::dynamic_shared<DraftTree>();
  Slot* slot = p.slots.at(id);
  const WarpTeam team;
  slot_draft(team, slot, p.share(b), tree);
  for (std::int32_t i = team.rank(); i < tree->size; i += team.size()) {
    slot->tree.tokens[i] = tree->tokens[i];
    slot->tree.parents[i] = tree->parents[i];
  }
  if (team.rank() == 0) slot->tree.size = tree->size;
}

__device__ __forceinline__ std::int32_t tree_rows(const DraftStepParams& p, int b) {
  const std::int32_t id = p.slot_ids[b];
  return p.slots.holds(id) ? p.slots.at(id)->tree.size : 0;
}

// Sum over the block; all threads call it.
__device__ __forceinline__ std::int32_t block_sum(std::int32_t value, std::int32_t* partial) {
  value = gpu::warp_sum(value);
  if (lane_id() == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  std::int32_t sum = 0;
#pragma unroll
  for (int w = 0; w < kGatherThreads / 32; ++w) sum += partial[w];
  __syncthreads();
  return sum;
}

// Rows of the requests before `b` that fit. The first one that does not is left out, and so are
// later ones only if they do not fit either: the same rule, in the same order, as on the host.
__device__ std::int32_t rows_before(const DraftStepParams& p, int b, std::int32_t* partial) {
  std::int32_t mine = 0;
  for (int other = static_cast<int>(threadIdx.x); other < b; other += kGatherThreads) {
    mine += tree_rows(p, other);
  }
  const std::int32_t sum = block_sum(mine, partial);
  if (sum <= p.num_rows) return sum;
  if (threadIdx.x == 0) {  // the host has planned too few rows: count one by one
    std::int32_t rows = 0;
    for (int other = 0; other < b; ++other) {
      const std::int32_t more = tree_rows(p, other);
      if (rows + more <= p.num_rows) rows += more;
    }
    partial[0] = rows;
  }
  __syncthreads();
  return partial[0];
}

__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const DraftStepParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int b = static_cast<int>(blockIdx.x), i = static_cast<int>(threadIdx.x);
  const std::int32_t first = rows_before(p, b, gpu::dynamic_shared<std::int32_t>());
  if (b == p.num_requests) {
    for (std::int32_t row = first + i; row < p.num_rows; row += kGatherThreads) {
      p.tokens[row] = 0;
      p.parents[row] = -1;
    }
    return;
  }
  const std::int32_t id = p.slot_ids[b];
  std::int32_t rows = tree_rows(p, b);
  const bool fits = first + rows <= p.num_rows;
  if (!fits) rows = 0;
  if (i < rows) {
    const Slot* slot = p.slots.at(id);
    p.tokens[first + i] = slot->tree.tokens[i];
    p.parents[first + i] = slot->tree.parents[i];
  }
  if (i != 0) return;
  if (b == 0) p.cu_rows[0] = 0;
  p.cu_rows[b + 1] = first + rows;
  const std::int32_t len = p.slots.holds(id) ? p.slots.at(id)->len : 0;
  p.kv_len[b] = len > 0 ? len - 1 : 0;
  if (!fits) report(p.exec.status, b, kStatusBadLength);
}

}  // namespace

void draft_step(const DraftStepParams& p) {
  const gpu::LaunchOptions options{.dependent = true};
  const auto requests = static_cast<unsigned>(p.num_requests);
  if (requests > 0) {
    gpu::launch(draft_kernel, dim3(requests), dim3(kDraftThreads), sizeof(DraftTree), p.exec.stream,
                options, p);
  }
  gpu::launch(gather_kernel, dim3(requests + 1), dim3(kGatherThreads),
              kGatherThreads / 32 * sizeof(std::int32_t), p.exec.stream, options, p);
}

}  // namespace specdec::cuda
