// What drafters on the step's stream need of slots: the drafts that they propose, the tokens and
// the hidden rows that they continue from.
//
// propose, recent one warp for each request; some hundred bytes. Limit: latency.
// keep            one block for each request; reads and writes a row, 16 bytes a thread and turn
//                 where the rows allow it. Limit: latency (8 KiB for a hidden size of 4096).
#include "algo/slot.h"
#include "common/warp_team.cuh"
#include "gpu/gpu.cuh"
#include "step/step.h"
#include "step/step_rows.cuh"

namespace specdec::cuda {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kKeepThreads = 128;

__global__ void __launch_bounds__(kWarpThreads) propose_drafts_kernel(const ProposeDraftsParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int b = static_cast<int>(blockIdx.x);
  const std::int32_t id = p.slot_ids[b];
  if (!p.slots.holds(id)) return;
  Slot* slot = p.slots.at(id);
  const std::int32_t len = slot_len_to_draft(slot, kMaxDraftLen);
  if (len == 0) return;
  const std::int64_t first = std::int64_t{b} * p.width;
  std::int32_t count = p.counts == nullptr ? p.width : p.counts[b];
  if (count > p.width) count = p.width;
  const WarpTeam team;
  const bool misplaced =
      propose_draft(team, slot->proposed_draft(), len, p.tokens + first,
                    p.parents == nullptr ? nullptr : p.parents + first,
                    p.survival == nullptr ? nullptr : p.survival + first, count, p.vocab_size);
  if (misplaced && team.rank() == 0) report(p.exec.status, b, kStatusBadTree);
}

__global__ void __launch_bounds__(kWarpThreads) recent_kernel(const RecentTokensParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int b = static_cast<int>(blockIdx.x), lane = lane_id();
  const std::int32_t id = p.slot_ids[b];
  Slot* slot = p.slots.holds(id) ? p.slots.at(id) : nullptr;
  std::int32_t len = 0;
  if (slot != nullptr) {
    len = slot_len_to_draft(slot, p.max_drafts == nullptr ? kMaxDraftLen : p.max_drafts[b]);
  }
  if (len < p.width) len = 0;
  for (std::int32_t i = lane; i < p.width; i += kWarpThreads) {
    p.tokens[std::int64_t{b} * p.width + i] = len > 0 ? slot->history()[len - p.width + i] : 0;
  }
  if (lane == 0) {
    p.lens[b] = len;
    if (p.room != nullptr) p.room[b] = len > 0 ? slot_draft_room(slot) : 0;
  }
}

template <typename Word>
__device__ __forceinline__ void copy_row(const KeepHiddenParams& p, std::int32_t row,
                                         std::int32_t slot) {
  const auto* from = reinterpret_cast<const Word*>(p.hidden + row * p.hidden_stride);
  auto* to = reinterpret_cast<Word*>(p.kept + slot * p.row_bytes);
  const auto words = static_cast<std::int32_t>(p.row_bytes / static_cast<int>(sizeof(Word)));
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < words; i += kKeepThreads) {
    to[i] = from[i];
  }
}

template <typename Word>
__global__ void __launch_bounds__(kKeepThreads) keep_kernel(const KeepHiddenParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int b = static_cast<int>(blockIdx.x);
  const std::int32_t row = p.row(b);
  if (row >= 0) copy_row<Word>(p, row, p.slot_ids[b]);
}

bool in_vectors(const KeepHiddenParams& p) {
  const auto is_aligned = [](const void* at) {
    return reinterpret_cast<std::uintptr_t>(at) % 16 == 0;
  };
  return p.row_bytes % 16 == 0 && p.hidden_stride % 16 == 0 && is_aligned(p.hidden) &&
         is_aligned(p.kept);
}

}  // namespace

void propose_drafts(const ProposeDraftsParams& p) {
  if (p.num_requests == 0) return;
  gpu::launch(propose_drafts_kernel, dim3(static_cast<unsigned>(p.num_requests)),
              dim3(kWarpThreads), 0, p.exec.stream, gpu::LaunchOptions{.dependent = true}, p);
}

void recent_tokens(const RecentTokensParams& p) {
  if (p.num_requests == 0) return;
  gpu::launch(recent_kernel, dim3(static_cast<unsigned>(p.num_requests)), dim3(kWarpThreads), 0,
              p.exec.stream, gpu::LaunchOptions{.dependent = true}, p);
}

void keep_hidden(const KeepHiddenParams& p) {
  if (p.num_requests == 0) return;
  gpu::launch(in_vectors(p) ? keep_kernel<uint4> : keep_kernel<std::uint16_t>,
              dim3(static_cast<unsigned>(p.num_requests)), dim3(kKeepThreads), 0, p.exec.stream,
              gpu::LaunchOptions{.dependent = true}, p);
}

}  // namespace specdec::cuda
