// After the model: acceptance along each request's tree, stop rules, history, drafter.
//
// Grid     one block for each request, of which one warp does the step; the others are for a prompt
//          that enters an n-gram index, and end at once where there is none. Tree, working memory
//          and the target's choices lie in shared memory, where the walks along the tree take a
//          cycle or two per node and lane.
// Bytes    a few kilobytes for each request: its tree, its choices, what accept_step kept, the pool
//          sets of what it adds.
// Limit    latency; requests do not wait for each other.
#include "algo/slot.h"
#include "common/warp_team.cuh"
#include "gpu/gpu.cuh"
#include "step/enter_prompt.cuh"
#include "step/step.h"
#include "step/step_rows.cuh"

namespace specdec::cuda {
namespace {

constexpr int kCommitThreads = 512;

struct CommitShared {
  DraftTree tree;
  AcceptResult accepted;
  TokenId sampled[kMaxStepTokens];
  SlotResult result;
  std::int32_t path[kMaxStepTokens];
  std::int32_t path_len;
};

__device__ void write_result(const CommitStepParams& p, int b, const CommitShared& shared) {
  SlotResult& out = p.results[b];
  const SlotResult& result = shared.result;
  const int lane = lane_id();
  for (int i = lane; i < result.num_tokens; i += 32) out.tokens[i] = result.tokens[i];
  for (int i = lane; i < shared.path_len; i += 32) {
    p.path[std::int64_t{b} * kMaxStepTokens + i] = shared.path[i];
  }
  if (lane != 0) return;
  out.num_tokens = result.num_tokens;
  out.num_drafts = result.num_drafts;
  out.num_accepted = result.num_accepted;
  out.finish = result.finish;
  out.stop_token = result.stop_token;
  out.bad_row = result.bad_row;
  p.path_len[b] = shared.path_len;
}

__global__ void __launch_bounds__(kCommitThreads, 1) commit_kernel(const CommitStepParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  CommitShared& shared = *gpu::dynamic_shared<CommitShared>();
  const WarpTeam team;
  const int b = static_cast<int>(blockIdx.x);
  const std::int32_t id = p.slot_ids[b];
  bool entered = false;
  if (p.slots.holds(id)) {
    Slot* slot = p.slots.at(id);
    const std::int64_t rows = std::int64_t{p.cu_logits[b + 1]} - p.cu_logits[b];
    if (slot->method == SlotMethod::kNgram && slot->begun == 0 && rows > 0 &&
        rows == slot_logit_rows(slot, slot->tree.size) && p.cu_logits[b] >= 0 &&
        p.cu_logits[b] <= p.num_sampled - rows) {
      entered = enter_prompt(slot->ngram_index(), slot->max_len, ngrams_up_to(slot->max_ngram),
                             slot->history(), slot->len);
    }
  }
  __syncthreads();  // all have read the slot
  if (threadIdx.x >= 32) return;
  if (!p.slots.holds(id)) {
    if (team.rank() == 0) {
      shared.result = SlotResult{};
      shared.result.stop_token = kNoStopToken;
      shared.path_len = 0;
    }
    team.sync();
    return write_result(p, b, shared);
  }
  Slot* slot = p.slots.at(id);
  const std::int32_t first = p.cu_logits[b];
  const std::int64_t rows = std::int64_t{p.cu_logits[b + 1]} - first;
  const std::int32_t size = slot->tree.size;
  const std::int32_t expected = slot_logit_rows(slot, size);
  if (rows == 0 || rows != expected || first < 0 || first > p.num_sampled - rows) {
    slot_no_result(team, slot, &shared.result, &shared.path_len);
    if (rows != 0 && team.rank() == 0) report(p.exec.status, b, kStatusBadLength);
    return write_result(p, b, shared);
  }
  for (std::int32_t i = team.rank(); i < size; i += team.size()) {
    shared.tree.tokens[i] = slot->tree.tokens[i];
    shared.tree.parents[i] = slot->tree.parents[i];
  }
  for (std::int32_t i = team.rank(); i < rows; i += team.size()) {
    shared.sampled[i] = p.sampled[first + i];
  }
  if (team.rank() == 0) shared.tree.size = size;  // slot_begin_tree begins with a barrier
  slot_begin_tree(team, slot, &shared.tree);
  if (p.accepted.given()) {
    p.accepted.load(team, b, &shared.accepted);
    if (!is_accepted_path(team, &shared.tree, &shared.accepted)) {
      slot_no_result(team, slot, &shared.result, &shared.path_len);
      if (team.rank() == 0) report(p.exec.status, b, kStatusBadTree);
      return write_result(p, b, shared);
    }
  } else {
    slot_accept(team, &shared.tree, shared.sampled, &shared.accepted);
  }
  slot_commit(team, slot, &shared.tree, shared.sampled, &shared.accepted, &shared.result,
              shared.path, &shared.path_len, true, entered);
  write_result(p, b, shared);
}

}  // namespace

void commit_step(const CommitStepParams& p) {
  if (p.num_requests == 0) return;
  gpu::launch(commit_kernel, dim3(static_cast<unsigned>(p.num_requests)), dim3(kCommitThreads),
              sizeof(CommitShared), p.exec.stream, gpu::LaunchOptions{.dependent = true}, p);
}

}  // namespace specdec::cuda
