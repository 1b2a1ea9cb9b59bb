#include "attention/dispatch.h"

#include <algorithm>

#include "attention/generic.h"
#include "attention/spec_attention.h"
#include "backend/attention/pick.h"
#include "backend/attention/table.h"
#include "base/check.h"

namespace specdec::cuda {
namespace {

// The part of a call that covers query heads [first, first + group) of each of the KV heads
// [kv_head, kv_head + kv_heads).
SpecAttentionParams slice_heads(const SpecAttentionParams& params, std::int32_t kv_head,
                                std::int32_t kv_heads, std::int32_t first, std::int32_t group) {
  SpecAttentionParams slice = params;
  const std::int64_t head =
      std::int64_t{kv_head} * (params.num_heads / params.cache.num_kv_heads) + first;
  const auto element = static_cast<std::int64_t>(dtype_bytes(params.dtype));
  const std::int64_t rows = head * params.cache.head_dim * element;
  const std::int64_t pages = kv_head * params.cache.stride_head *
                             static_cast<std::int64_t>(dtype_bytes(params.cache.dtype));
  slice.q = static_cast<const char*>(params.q) + rows;
  slice.out = static_cast<char*>(params.out) + rows;
  slice.cache.k = static_cast<char*>(params.cache.k) + pages;
  slice.cache.v = static_cast<char*>(params.cache.v) + pages;
  slice.cache.num_kv_heads = kv_heads;
  slice.num_heads = kv_heads * group;
  if (params.sinks != nullptr) slice.sinks = params.sinks + head;
  const std::int64_t scale = std::int64_t{kv_head} * params.scale_stride;
  if (params.k_scale != nullptr) slice.k_scale = params.k_scale + scale;
  if (params.v_scale != nullptr) slice.v_scale = params.v_scale + scale;
  return slice;
}

}  // namespace

void spec_attention(const SpecAttentionParams& params, const DeviceLimits& limits) {
  const attention::AttentionPlan plan =
      attention::plan_workspace(attention::problem_of(params), limits, params.instance);
  if (plan.instance == nullptr) return generic_attention(params);
  SPECDEC_REQUIRE(params.exec.workspace_bytes >= plan.layout.total_bytes, "workspace has ",
                  params.exec.workspace_bytes, " bytes: spec_attention needs ",
                  plan.layout.total_bytes, " here (ops.plan_workspace)");
  const attention::MainLauncher launch_main = attention::main_launcher(
      static_cast<std::size_t>(plan.instance - attention::instances().data()));
  const std::int32_t kv_heads = params.cache.num_kv_heads;
  const std::int32_t group = params.num_heads / kv_heads;
  const bool one_pass = plan.pass_kv_heads == kv_heads && plan.pass_group == group;
  for (std::int32_t g = 0; g < kv_heads; g += plan.pass_kv_heads) {
    for (std::int32_t h = 0; h < group; h += plan.pass_group) {
      const SpecAttentionParams slice =
          slice_heads(params, g, std::min(plan.pass_kv_heads, kv_heads - g), h,
                      std::min(plan.pass_group, group - h));
      attention::AttentionLaunch launch =
          attention::make_launch(slice, plan.layout, *plan.instance);
      launch.plan_is_old = one_pass && params.reuse_plan;
      if (!launch.plan_is_old) attention::launch_plan(launch);
      launch_main(launch);
      attention::launch_finish(launch);
    }
  }
}

}  // namespace specdec::cuda
