// The buffers of one step, made once at their maximum size: addresses never change, so a step can
// be captured as a graph and the model can hold pointers into it.
//
// The executor fills a plan in plan() and reads it again in commit(); in between the model's
// forward pass reads it. A plan is valid until the executor's next plan() (checked by
// `generation`).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/step_view.h"
#include "base/types.h"
#include "tree/draft_tree.h"

namespace specdec {

inline constexpr std::int32_t kLeftPage = 2;

struct StepPlan {
  StepPlan(int max_requests, int max_rows, int max_pages_per_request);

  StepView view() const;
  std::size_t memory_bytes() const;

  std::uint64_t generation = 0;
  std::int64_t step = -1;     // of the executor that planned it
  bool needs_logits = false;  // some request needs full score rows, not just the argmax
  int num_prefill_rows = 0;   // rows that belong to prompts
  int num_prompts = 0;        // requests that have such rows, in front of the others
  int num_requests = 0, num_rows = 0, num_logit_rows = 0;
  int page_table_stride = 0;

  std::vector<TokenId> tokens;           // [max_rows]
  std::vector<std::int32_t> positions;   // [max_rows]
  std::vector<std::int32_t> parents;     // [max_rows]
  std::vector<std::uint32_t> mask;       // [max_rows, kMaskWords]
  std::vector<std::int32_t> cu_rows;     // [max_requests + 1]
  std::vector<std::int32_t> kv_len;      // [max_requests]
  std::vector<std::uint8_t> is_tree;     // [max_requests]
  std::vector<std::int32_t> page_table;  // [max_requests, max_pages_per_request]
  std::vector<std::int32_t> logit_rows;  // [max_rows]
  std::vector<std::int32_t> cu_logits;   // [max_requests + 1] first logit row of each request
  std::vector<std::int32_t> slot;        // [max_requests] the request's slot in the executor
  std::vector<RequestId> request_ids;    // [max_requests] 0 in a plan made by hand
  // What the last commit moved in the pages: pairs (from, to) of page * page size + place in it, in
  // this order. Ranks that hold K/V of other heads move theirs before their next forward pass.
  std::vector<std::int32_t> kv_moves;
  // What was done with pages behind those moves, in this order, for the same ranks: triples (1,
  // page, page of the host's pool) of one that was copied to that, (0, ...) of one that was copied
  // from there, (kLeftPage, page, narrow window) of one whose layers with that window gave its
  // memory back.
  std::vector<std::int32_t> page_orders;
};

}  // namespace specdec
