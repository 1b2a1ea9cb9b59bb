// Which kernel serves an attention call, and how much scratch it takes: pure functions of what the
// host knows, tested without a GPU.
#pragma once

#include <cstdint>
#include <span>

#include "backend/attention/instance.h"
#include "backend/attention/work.h"
#include "backend/device_limits.h"
#include "backend/ops.h"

namespace specdec::attention {

struct AttentionProblem {
  DType dtype = DType::kBF16;     // of q and out
  DType kv_dtype = DType::kBF16;  // of the pages
  std::int32_t head_dim = 0, num_heads = 0, num_kv_heads = 0, page_size = 0;
  std::int32_t num_requests = 0, num_rows = 0;
  std::int32_t max_rows = 0, max_kv_len = 0;  // as in StepView
  bool aligned = true;  // every row of q, out, K and V begins at a multiple of 16 bytes
};

AttentionProblem problem_of(const SpecAttentionParams& params);

// How one call is served.
struct AttentionPlan {
  const AttentionInstance* instance = nullptr;  // null: the generic kernel, which needs no scratch
  WorkLayout layout;
  // The heads of one pass: the call is repeated over slices of its heads, with the same scratch,
  // when the states of all of them would not fit. Heads are independent, so no bit depends on it.
  std::int32_t pass_kv_heads = 0;
  std::int32_t pass_group = 0;  // query heads per KV head
};

// Scratch of one call is never more.
inline constexpr std::int64_t kMaxWorkspaceBytes = std::int64_t{256} << 20;

// The row of `table` that serves the problem on a device, null for the generic kernel. The family
// depends on the device, dtypes, head_dim, page size and alignment only, so that a row's arithmetic
// is the same however many rows there are; only the row tile follows max_rows.
// `name`: a row of the table or "generic", which is then taken; "fp8": the best one whose matrix
// operands are e4m3; null: the best one whose operands are of q's type.
// std::invalid_argument if the device is older than 8.0 or the named kernel cannot serve this.
const AttentionInstance* pick(const AttentionProblem& problem, const DeviceLimits& limits,
                              const char* name, std::span<const AttentionInstance> table);

// pick() from instances(), and its scratch. std::invalid_argument if the states of a single head
// exceed kMaxWorkspaceBytes (some 250,000 rows).
AttentionPlan plan_workspace(const AttentionProblem& problem, const DeviceLimits& limits,
                             const char* name);

}  // namespace specdec::attention
