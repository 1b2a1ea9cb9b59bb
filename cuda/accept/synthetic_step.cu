// As many drafts as rates say, and the target's own choice after them: for measurements.
//
// Grid     one warp for each request; tree, choices and working memory in shared memory.
// Bytes    a request's tree and choices once, its rates (a few doubles, from L2).
// Limit    latency; requests do not wait for each other.
#include "accept/accept.h"
#include "accept/accept_result.cuh"
#include "common/warp_team.cuh"
#include "gpu/gpu.cuh"
#include "step/step_rows.cuh"

namespace specdec::cuda {
namespace {

constexpr int kSyntheticThreads = 32;

struct SyntheticShared {
  AcceptResult result;
  TokenId tokens[kMaxStepTokens];
  std::int32_t parents[kMaxStepTokens];
  TokenId sampled[kMaxStepTokens];
};

__global__ void __launch_bounds__(kSyntheticThreads, 1)
    synthetic_kernel(const SyntheticStepParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  SyntheticShared& shared = *gpu::dynamic_shared<SyntheticShared>();
  const WarpTeam team;
  const int b = static_cast<int>(blockIdx.x);
  const std::int32_t first = p.cu_logits[b];
  const bool valid = has_rows(p.cu_logits, p.rows, b);
  const std::int32_t size = valid ? p.cu_logits[b + 1] - first : 0;
  if (!valid || size == 0 || size > kMaxStepTokens) {
    if (team.rank() == 0 && !valid) report(p.exec.status, b, kStatusBadLength);
    if (team.rank() == 0 && size > kMaxStepTokens) report(p.exec.status, b, kStatusBadTree);
    return write_result(team, p, b, nullptr);
  }
  for (std::int32_t i = team.rank(); i < size; i += team.size()) {
    shared.tokens[i] = p.tokens[first + i];
    shared.parents[i] = p.parents[first + i];
    shared.sampled[i] = p.sampled[first + i];
  }
  team.sync();
  const DraftedTree tree{shared.tokens, shared.parents, size, p.seed[b],
                         std::int64_t{p.positions[first]} + 1};
  bool drafted = true;
  for (std::int32_t i = team.rank(); i < size; i += team.size()) {
    drafted &= is_drafted_node(tree, i, p.vocab);
  }
  const std::uint32_t flags = (team.any(!drafted) ? kStatusBadTree : 0u) |
                              (team.any(!are_rates(team, p.rates)) ? kStatusBadLaw : 0u);
  if (flags != 0) {
    if (team.rank() == 0) report(p.exec.status, b, flags);
    return write_result(team, p, b, nullptr);
  }
  const auto choose = [&](std::int32_t node, std::int32_t) { return shared.sampled[node]; };
  accept_synthetic(team, tree, p.rates, p.vocab, choose, shared.sampled, &shared.result);
  for (std::int32_t i = team.rank(); i < size; i += team.size()) {
    p.sampled[first + i] = shared.sampled[i];
  }
  if (team.rank() == 0 && shared.result.bad_row >= 0) report(p.exec.status, b, kStatusNaN);
  write_result(team, p, b, &shared.result);
}

}  // namespace

void synthetic_step(const SyntheticStepParams& p) {
  if (p.num_requests == 0) return;
  gpu::launch(synthetic_kernel, dim3(static_cast<unsigned>(p.num_requests)),
              dim3(kSyntheticThreads), sizeof(SyntheticShared), p.exec.stream,
              gpu::LaunchOptions{.dependent = true}, p);
}

}  // namespace specdec::cuda
