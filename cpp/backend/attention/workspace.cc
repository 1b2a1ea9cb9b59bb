// The scratch of an attention call: jobs, units and states (work.h), at most kMaxWorkspaceBytes.
#include <algorithm>

#include "backend/attention/arithmetic.h"
#include "backend/attention/pick.h"
#include "backend/attention/table.h"
#include "base/check.h"

namespace specdec::attention {
namespace {

constexpr std::int64_t align(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }
constexpr std::int64_t div_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Persistent thread blocks: as many as the device holds at once. A block's shared memory costs a
// kilobyte more than it asks for, of one kilobyte more than a single block may have.
std::int32_t resident_blocks(const AttentionInstance& instance, const DeviceLimits& limits) {
  const std::int32_t fit = (limits.shared_bytes + 1024) / (instance.smem_bytes + 1024);
  return limits.num_sms * std::max(1, std::min(instance.blocks_per_sm, fit));
}

// The most jobs that `kv_heads` KV heads of `group` query heads each can make: row blocks of
// requests that are not empty, each cut up by itself.
std::int64_t most_jobs(const AttentionProblem& problem, std::int64_t row_tile,
                       std::int64_t kv_heads, std::int64_t group) {
  const std::int64_t requests = std::min(problem.num_requests, problem.num_rows);
  const std::int64_t by_request = requests * div_up(problem.max_rows * group, row_tile);
  const std::int64_t in_all = (problem.num_rows * group + requests * (row_tile - 1)) / row_tile;
  return kv_heads * std::min(by_request, in_all);
}

// Lays out room for `jobs` jobs and, as far as it fits, for the states of those that are cut.
WorkLayout lay_out(const AttentionProblem& problem, const AttentionInstance& instance,
                   std::int64_t jobs, std::int32_t num_blocks) {
  WorkLayout layout;
  layout.row_tile = instance.row_tile;
  layout.head_dim = instance.head_dim;
  layout.num_blocks = num_blocks;
  layout.max_jobs = static_cast<std::int32_t>(jobs);
  // The blocks' shares are consecutive: there are fewer cuts than blocks. Sink tokens that lie
  // apart are a unit more.
  layout.max_units = static_cast<std::int32_t>(2 * jobs + num_blocks);
  std::int64_t at = 0;
  const auto place = [&at](std::int64_t bytes) {
    const std::int64_t offset = at;
    at = align(at + bytes);
    return offset;
  };
  layout.header = place(sizeof(WorkHeader));
  layout.jobs = place(jobs * static_cast<std::int64_t>(sizeof(Job)));
  layout.units = place(layout.max_units * static_cast<std::int64_t>(sizeof(Unit)));
  layout.job_begin = place((std::int64_t{problem.num_requests} + 1) * 4);
  layout.block_begin = place((num_blocks + 1) * 4);
  layout.request_flags = place(std::int64_t{problem.num_requests} * 4);
  // A cut job leaves one state, and one for each chunk after its first cut.
  const std::int64_t chunks = chunk_of(std::max(problem.max_kv_len, 1) - 1) + 1;
  const std::int64_t wanted = jobs + std::min<std::int64_t>(jobs, num_blocks) * (chunks - 1);
  const std::int64_t slot_bytes = std::int64_t{4} * instance.row_tile * (2 + instance.head_dim);
  const std::int64_t room = (kMaxWorkspaceBytes - at - 512) / slot_bytes;
  const std::int64_t slots = std::max(jobs, std::min(wanted, room));
  layout.max_slots = static_cast<std::int32_t>(slots);
  layout.state_ml = place(slots * instance.row_tile * 2 * 4);
  layout.state_o = place(slots * instance.row_tile * instance.head_dim * 4);
  layout.total_bytes = at;
  return layout;
}

}  // namespace

AttentionPlan plan_workspace(const AttentionProblem& problem, const DeviceLimits& limits,
                             const char* name) {
  AttentionPlan plan;
  plan.instance = pick(problem, limits, name, instances());
  plan.pass_kv_heads = problem.num_kv_heads;
  plan.pass_group = problem.num_heads / problem.num_kv_heads;
  if (plan.instance == nullptr) return plan;
  const std::int32_t blocks = resident_blocks(*plan.instance, limits);
  const auto fits = [&](std::int32_t kv_heads, std::int32_t group) {
    plan.layout = lay_out(problem, *plan.instance,
                          most_jobs(problem, plan.instance->row_tile, kv_heads, group), blocks);
    return plan.layout.total_bytes <= kMaxWorkspaceBytes;
  };
  while (!fits(plan.pass_kv_heads, plan.pass_group)) {
    std::int32_t& heads = plan.pass_kv_heads > 1 ? plan.pass_kv_heads : plan.pass_group;
    SPECDEC_REQUIRE(heads > 1, "q has ", problem.num_rows, " rows: the states of one head take ",
                    plan.layout.total_bytes, " bytes, at most ", kMaxWorkspaceBytes,
                    " are used; give fewer rows to a call");
    heads = (heads + 1) / 2;
  }
  return plan;
}

}  // namespace specdec::attention
