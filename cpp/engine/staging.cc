#include "engine/staging.h"

#include <limits>

#include "base/check.h"

namespace specdec {

StagingLayout::StagingLayout(int max_requests, int max_rows, int max_pages_per_request,
                             int num_narrow)
    : requests(max_requests),
      rows(max_rows),
      pages_per_request(max_pages_per_request),
      narrow(num_narrow) {
  std::int64_t next = 0;
  auto take = [&](std::int64_t count) {
    const std::int64_t offset = next;
    next += (count + 3) / 4 * 4;  // 16-byte aligned
    return static_cast<int>(offset);
  };
  slot_ids = take(requests);
  commit_ids = take(requests);
  max_drafts = take(requests);
  window_rows = take(requests);
  guesses = take(requests);
  kv_len = take(requests);
  cu_rows = take(requests + 1);
  cu_logits = take(requests + 1);
  temperature = take(requests);
  top_p = take(requests);
  min_p = take(requests);
  top_k = take(requests);
  seed = take(std::int64_t{2} * requests);
  acceptance = take((requests + 3) / 4);
  posterior_threshold = take(requests);
  posterior_alpha = take(requests);
  acceptance_threshold = take(requests);
  page_table = take(std::int64_t{requests} * pages_per_request);
  narrow_tables = take(std::int64_t{narrow} * requests * pages_per_request);
  logit_rows = take(rows);
  prompt_tokens = take(rows);
  prompt_parents = take(rows);
  choice_parents = take(rows);
  move_kv_len = take(requests);
  move_cu_rows = take(requests + 1);
  move_path = take(std::int64_t{requests} * kMaxStepTokens);
  move_path_len = take(requests);
  SPECDEC_REQUIRE(next <= std::numeric_limits<std::int32_t>::max(), "a step's staging buffer of ",
                  next, " words is too large: lower max_batch_size or max_seq_len");
  words = static_cast<int>(next);
}

}  // namespace specdec
