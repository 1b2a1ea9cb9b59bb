#include "engine/step_plan.h"

namespace specdec {

StepPlan::StepPlan(int max_requests, int max_rows, int max_pages_per_request)
    : page_table_stride(max_pages_per_request),
      tokens(max_rows),
      positions(max_rows),
      parents(max_rows),
      mask(static_cast<std::size_t>(max_rows) * kMaskWords),
      cu_rows(max_requests + 1),
      kv_len(max_requests),
      is_tree(max_requests),
      page_table(static_cast<std::size_t>(max_requests) * max_pages_per_request),
      logit_rows(max_rows),
      cu_logits(max_requests + 1),
      slot(max_requests),
      request_ids(max_requests) {}

StepView StepPlan::view() const {
  StepView v;
  v.num_requests = num_requests;
  v.num_rows = num_rows;
  v.tokens = tokens.data();
  v.positions = positions.data();
  v.parents = parents.data();
  v.mask = mask.data();
  v.cu_rows = cu_rows.data();
  v.kv_len = kv_len.data();
  v.is_tree = is_tree.data();
  v.page_table = page_table.data();
  v.page_table_stride = page_table_stride;
  v.logit_rows = logit_rows.data();
  v.num_logit_rows = num_logit_rows;
  return v;
}

std::size_t StepPlan::memory_bytes() const {
  auto bytes = [](const auto& v) { return v.capacity() * sizeof(v[0]); };
  return bytes(tokens) + bytes(positions) + bytes(parents) + bytes(mask) + bytes(cu_rows) +
         bytes(kv_len) + bytes(is_tree) + bytes(page_table) + bytes(logit_rows) + bytes(cu_logits) +
         bytes(slot) + bytes(request_ids) + bytes(kv_moves);
}

}  // namespace specdec
