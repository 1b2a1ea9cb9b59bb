// Draft trees of a draft model on the step's stream: a level of all of them, the rows of the next
// pass, and the trees into the slots.
//
// Grid     one warp for each request; pack has one more, which clears what no request uses.
// grow     reads width shares and columns of each open node, a few KiB; working memory in shared
//          memory. Limit: latency, a count of who goes before whom among some hundred nodes.
// pack     adds up the rows of the requests in front, which spares a scan over blocks.
#include "algo/draft_growth.h"
#include "backend/growth_ops.h"
#include "common/warp_team.cuh"
#include "gpu/gpu.cuh"
#include "step/step.h"
#include "step/step_rows.cuh"

namespace specdec::cuda {
namespace {

constexpr int kWarpThreads = 32;

__global__ void __launch_bounds__(kWarpThreads) grow_drafts_kernel(const GrowDraftsParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int b = static_cast<int>(blockIdx.x);
  const WarpTeam team;
  DraftGrowth* growth = p.growths + b;
  if (p.begins && team.rank() == 0) begin_growth(growth);
  team.sync();
  if (p.limit(b) <= 0 || (!p.begins && growth->num_open == 0)) return;
  specdec::grow_drafts(team, p.children_of(b), p.limit(b), p.max_open, growth,
                       gpu::dynamic_shared<DraftGrowthScratch>());
}

__global__ void __launch_bounds__(kWarpThreads) pack_kernel(const PackDraftsParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int b = static_cast<int>(blockIdx.x);
  std::int32_t first = 0;
  for (int before = 0; before < b; ++before) {
    const std::int32_t rows = p.rows(before);
    if (first + rows <= p.num_rows) first += rows;
  }
  const WarpTeam team;
  if (b == p.num_requests) {
    if (team.rank() == 0) p.cu_rows[b] = first;
    for (std::int32_t row = first + team.rank(); row < p.num_rows; row += team.size()) {
      p.tokens[row] = 0;
      p.parents[row] = -1;
      if (p.sources != nullptr) p.sources[row] = -1;
    }
    return;
  }
  if (team.rank() == 0) p.cu_rows[b] = first;
  pack_growth(team, p, b, first);
}

__global__ void __launch_bounds__(kWarpThreads)
    propose_growths_kernel(const ProposeGrowthsParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int b = static_cast<int>(blockIdx.x);
  const std::int32_t id = p.slot_ids[b];
  if (!p.slots.holds(id)) return;
  Slot* slot = p.slots.at(id);
  const std::int32_t len = slot_len_to_draft(slot, kMaxDraftLen);
  if (len == 0) return;
  propose_growth(WarpTeam{}, p.growths + b, len, slot->proposed_draft(),
                 gpu::dynamic_shared<DraftGrowthScratch>());
}

}  // namespace

void grow_drafts(const GrowDraftsParams& p) {
  if (p.num_requests == 0) return;
  gpu::launch(grow_drafts_kernel, dim3(static_cast<unsigned>(p.num_requests)), dim3(kWarpThreads),
              sizeof(DraftGrowthScratch), p.exec.stream, gpu::LaunchOptions{.dependent = true}, p);
}

void pack_drafts(const PackDraftsParams& p) {
  gpu::launch(pack_kernel, dim3(static_cast<unsigned>(p.num_requests) + 1), dim3(kWarpThreads), 0,
              p.exec.stream, gpu::LaunchOptions{.dependent = true}, p);
}

void propose_growths(const ProposeGrowthsParams& p) {
  if (p.num_requests == 0) return;
  gpu::launch(propose_growths_kernel, dim3(static_cast<unsigned>(p.num_requests)),
              dim3(kWarpThreads), sizeof(DraftGrowthScratch), p.exec.stream,
              gpu::LaunchOptions{.dependent = true}, p);
}

}  // namespace specdec::cuda
