#include "backend/attention/pick.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "backend/attention/table.h"
#include "base/check.h"

namespace specdec::attention {
namespace {

// Pages that the copies of the fast families can walk: 16 keys are one copy.
constexpr std::int32_t kMinFastPage = 16;

// Why an instance cannot serve a problem on a device; null: it can.
const char* obstacle(const AttentionInstance& instance, const AttentionProblem& problem,
                     const DeviceLimits& limits) {
  if (instance.family == Family::kHopper && (limits.major != 9 || limits.minor != 0)) {
    return "it needs compute capability 9.0";
  }
  if (instance.smem_bytes > limits.shared_bytes) return "it needs more shared memory";
  if (instance.dtype != problem.dtype) return "q has another dtype";
  if (instance.kv_dtype != problem.kv_dtype) return "the pages have another dtype";
  if (instance.head_dim != problem.head_dim) return "it is for another head_dim";
  if (problem.page_size < kMinFastPage) return "its pages hold at least 16 tokens";
  if (!problem.aligned) return "rows have to begin at multiples of 16 bytes";
  return nullptr;
}

// Rows of a block that one read of K/V pays for: fewer rows in a block take as long as these.
// On 9.0 the matrix rate and the L2 cache meet there (docs/kernels/spec_attention.md); on 8.x every
// read counts.
constexpr std::int64_t kRowsPerRead = 110;

std::int64_t cost(const AttentionInstance& instance, std::int64_t rows) {
  const std::int64_t blocks = (rows + instance.row_tile - 1) / instance.row_tile;
  if (instance.family != Family::kHopper) return blocks;
  return blocks * std::max<std::int64_t>(instance.row_tile, kRowsPerRead);
}

// Is `a` the better kernel for a problem that both can serve? A newer family first; within one, the
// cheaper blocks and then the smaller tile.
bool better(const AttentionInstance& a, const AttentionInstance& b, std::int64_t rows) {
  if (a.family != b.family) return a.family > b.family;
  const std::int64_t cost_a = cost(a, rows), cost_b = cost(b, rows);
  return cost_a != cost_b ? cost_a < cost_b : a.row_tile < b.row_tile;
}

// The best of the rows with these operands that can serve the problem; null: none.
const AttentionInstance* best_of(const AttentionProblem& problem, const DeviceLimits& limits,
                                 DType math_dtype, std::span<const AttentionInstance> table) {
  const std::int64_t rows =
      std::int64_t{problem.max_rows} * (problem.num_heads / problem.num_kv_heads);
  const AttentionInstance* best = nullptr;
  for (const AttentionInstance& row : table) {
    if (row.math_dtype != math_dtype || obstacle(row, problem, limits) != nullptr) continue;
    if (best == nullptr || better(row, *best, rows)) best = &row;
  }
  return best;
}

std::string described(const AttentionProblem& problem, const DeviceLimits& limits) {
  return detail::join("q ", dtype_name(problem.dtype), ", pages ", dtype_name(problem.kv_dtype),
                      ", head_dim ", problem.head_dim, ", page size ", problem.page_size,
                      problem.aligned ? "" : ", rows not at multiples of 16 bytes", ", device ",
                      limits.major, ".", limits.minor, " with ", limits.shared_bytes,
                      " bytes of shared memory");
}

const AttentionInstance* named(const char* name, const AttentionProblem& problem,
                               const DeviceLimits& limits,
                               std::span<const AttentionInstance> table) {
  if (std::strcmp(name, "generic") == 0) return nullptr;
  if (std::strcmp(name, "fp8") == 0) {
    const AttentionInstance* best = best_of(problem, limits, DType::kF8E4M3, table);
    SPECDEC_REQUIRE(best != nullptr, "instance = \"fp8\": no kernel multiplies in e4m3 here (",
                    described(problem, limits), "); ops.supported_attention() lists math_dtype");
    return best;
  }
  for (const AttentionInstance& row : table) {
    if (std::strcmp(row.name, name) != 0) continue;
    const char* reason = obstacle(row, problem, limits);
    SPECDEC_REQUIRE(reason == nullptr, "instance = \"", name, "\": ", reason, " (",
                    described(problem, limits), ")");
    return &row;
  }
  throw std::invalid_argument(detail::join("instance = \"", name,
                                           "\": no such kernel; ops.supported_attention() lists "
                                           "them, and there are \"generic\" and \"fp8\""));
}

}  // namespace

const AttentionInstance* pick(const AttentionProblem& problem, const DeviceLimits& limits,
                              const char* name, std::span<const AttentionInstance> table) {
  SPECDEC_REQUIRE(limits.major >= 8, "the device has compute capability ", limits.major, ".",
                  limits.minor, ": these kernels need 8.0 or newer");
  if (name != nullptr) return named(name, problem, limits, table);
  // Matrix operands of fewer bits than q's round q itself: only by name.
  return best_of(problem, limits, problem.dtype, table);
}

AttentionProblem problem_of(const SpecAttentionParams& params) {
  const KvCacheView& cache = params.cache;
  AttentionProblem problem;
  problem.dtype = params.dtype;
  problem.kv_dtype = cache.dtype;
  problem.head_dim = cache.head_dim;
  problem.num_heads = params.num_heads;
  problem.num_kv_heads = cache.num_kv_heads;
  problem.page_size = cache.page_size;
  problem.num_requests = params.step.num_requests;
  problem.num_rows = params.step.num_rows;
  problem.max_rows = params.step.max_rows;
  problem.max_kv_len = params.step.max_kv_len;
  const auto element = static_cast<std::int64_t>(dtype_bytes(params.dtype));
  const auto stored = static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  std::uint64_t misfit =
      reinterpret_cast<std::uintptr_t>(params.q) | reinterpret_cast<std::uintptr_t>(params.out) |
      reinterpret_cast<std::uintptr_t>(cache.k) | reinterpret_cast<std::uintptr_t>(cache.v);
  for (const std::int64_t stride : {params.q_row_stride, params.out_row_stride}) {
    misfit |= static_cast<std::uint64_t>(stride * element);
  }
  misfit |= static_cast<std::uint64_t>(cache.head_dim * element);
  for (const std::int64_t stride :
       {cache.stride_layer, cache.stride_page, cache.stride_head, cache.stride_token}) {
    misfit |= static_cast<std::uint64_t>(stride * stored);
  }
  problem.aligned = misfit % 16 == 0;
  return problem;
}

}  // namespace specdec::attention
