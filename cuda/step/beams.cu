// Beam search on the step's stream: a depth of all requests' beams, and the draft trees at the end.
//
// Grid     one warp for each request; working memory in shared memory.
// grow     reads the best scores of each row (50 of 8 bytes and their columns), takes their softmax
//          and finds each candidate's place by counting those that go before it.
// merge    reads length * width nodes of 12 bytes.
// Limit    latency: some hundred bytes to a few KiB for each request.
#include "algo/beam_search.h"
#include "backend/beam_ops.h"
#include "common/warp_team.cuh"
#include "gpu/gpu.cuh"
#include "step/step.h"

namespace specdec::cuda {
namespace {

constexpr int kWarpThreads = 32;

__global__ void __launch_bounds__(kWarpThreads) grow_beams_kernel(const GrowBeamsParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int b = static_cast<int>(blockIdx.x);
  specdec::grow_beams(WarpTeam{}, p.scores_of(b), p.limits_of(b), p.depth, p.beams.at(b),
                      p.beams.reached + b, p.next_of(b), gpu::dynamic_shared<BeamScratch>());
}

__global__ void __launch_bounds__(kWarpThreads) merge_kernel(const MergeBeamsParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int b = static_cast<int>(blockIdx.x);
  const WarpTeam team;
  const std::int32_t size = specdec::merge_beams(
      team, p.beams.at(b), p.beams.reached[b], p.tokens + p.first(b), p.parents + p.first(b),
      p.sources_of(b), gpu::dynamic_shared<BeamMergeScratch>());
  if (team.rank() == 0) p.counts[b] = size;
}

}  // namespace

void grow_beams(const GrowBeamsParams& p) {
  if (p.num_requests == 0) return;
  gpu::launch(grow_beams_kernel, dim3(static_cast<unsigned>(p.num_requests)), dim3(kWarpThreads),
              sizeof(BeamScratch), p.exec.stream, gpu::LaunchOptions{.dependent = true}, p);
}

void merge_beams(const MergeBeamsParams& p) {
  if (p.num_requests == 0) return;
  gpu::launch(merge_kernel, dim3(static_cast<unsigned>(p.num_requests)), dim3(kWarpThreads),
              sizeof(BeamMergeScratch), p.exec.stream, gpu::LaunchOptions{.dependent = true}, p);
}

}  // namespace specdec::cuda
