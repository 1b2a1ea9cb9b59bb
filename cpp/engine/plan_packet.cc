#include "engine/plan_packet.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/pages.h"

namespace specdec {
namespace {

enum Word { kRequests, kRows, kLogitRows, kNeedsLogits, kPages, kMoves, kCopies, kHeaderWords };

// The arrays of a plan in the order of a packet; one text for both directions.
template <typename Plan, typename Visit>
void visit_arrays(Plan& plan, Visit&& visit) {
  visit(plan.tokens, plan.num_rows);
  visit(plan.positions, plan.num_rows);
  visit(plan.parents, plan.num_rows);
  visit(plan.mask, plan.num_rows * kMaskWords);
  visit(plan.cu_rows, plan.num_requests + 1);
  visit(plan.kv_len, plan.num_requests);
  visit(plan.is_tree, plan.num_requests);
  visit(plan.logit_rows, plan.num_logit_rows);
}

}  // namespace

std::vector<std::int32_t> pack_plan(const StepPlan& plan, int page_size) {
  SPECDEC_REQUIRE(is_page_size(page_size), "page_size = ", page_size,
                  ": a page's tokens are a power of two from 1 to ", kMaxPageSize);
  std::int64_t pages = 0;
  for (int b = 0; b < plan.num_requests; ++b) {
    const std::int64_t rows = plan.cu_rows[b + 1] - plan.cu_rows[b];
    pages = std::max(pages, pages_for(plan.kv_len[b] + rows, page_size));
  }
  pages = std::min<std::int64_t>(pages, plan.page_table_stride);
  std::vector<std::int32_t> words(kHeaderWords);
  words[kRequests] = plan.num_requests;
  words[kRows] = plan.num_rows;
  words[kLogitRows] = plan.num_logit_rows;
  words[kNeedsLogits] = plan.needs_logits;
  words[kPages] = static_cast<std::int32_t>(pages);
  words[kMoves] = static_cast<std::int32_t>(plan.kv_moves.size());
  words[kCopies] = static_cast<std::int32_t>(plan.page_orders.size());
  visit_arrays(plan, [&](const auto& array, int count) {
    std::transform(array.begin(), array.begin() + count, std::back_inserter(words),
                   [](auto value) { return static_cast<std::int32_t>(value); });
  });
  for (int b = 0; b < plan.num_requests; ++b) {
    const auto first = plan.page_table.begin() + std::ptrdiff_t{b} * plan.page_table_stride;
    words.insert(words.end(), first, first + pages);
  }
  words.insert(words.end(), plan.kv_moves.begin(), plan.kv_moves.end());
  words.insert(words.end(), plan.page_orders.begin(), plan.page_orders.end());
  return words;
}

void unpack_plan(const std::int32_t* words, std::int64_t count, StepPlan* plan) {
  SPECDEC_REQUIRE(count >= kHeaderWords && *std::min_element(words, words + kHeaderWords) >= 0,
                  "plan packet: ", count, " words without a header");
  plan->num_requests = words[kRequests];
  plan->num_rows = words[kRows];
  plan->num_logit_rows = words[kLogitRows];
  plan->needs_logits = words[kNeedsLogits] != 0;
  plan->page_table_stride = words[kPages];
  const std::int64_t requests = plan->num_requests, rows = plan->num_rows;
  const std::int64_t expected = kHeaderWords + rows * (3 + kMaskWords) + 3 * requests + 1 +
                                plan->num_logit_rows + requests * words[kPages] + words[kMoves] +
                                words[kCopies];
  SPECDEC_REQUIRE(count == expected, "plan packet: ", count, " words, its header needs ", expected);
  const std::int32_t* next = words + kHeaderWords;
  const auto take = [&next](auto& array, std::int64_t size) {
    using Value = typename std::remove_reference_t<decltype(array)>::value_type;
    if (static_cast<std::int64_t>(array.size()) < size) array.resize(size);
    std::transform(next, next + size, array.begin(),
                   [](std::int32_t word) { return static_cast<Value>(word); });
    next += size;
  };
  visit_arrays(*plan, take);
  take(plan->page_table, requests * words[kPages]);
  plan->kv_moves.assign(next, next + words[kMoves]);
  next += words[kMoves];
  plan->page_orders.assign(next, next + words[kCopies]);
  ++plan->generation;
}

}  // namespace specdec
