// Drawing tokens and accepting drafts on the CPU, on the calling thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/accept_ops.h"

namespace specdec::cpu {

void sample_rows(const SampleRowsParams& params);
void accept_step(const AcceptStepParams& params);
void synthetic_step(const SyntheticStepParams& params);

inline void report(const ExecutionContext& exec, std::int32_t b, std::uint32_t flags) {
  if (exec.status != nullptr) exec.status[b] |= flags;
}

inline bool is_drafted_tree(const DraftedTree& tree, std::int32_t vocab) {
  if (tree.size > kMaxStepTokens) return false;
  for (std::int32_t node = 0; node < tree.size; ++node) {
    if (!is_drafted_node(tree, node, vocab)) return false;
  }
  return true;
}

inline bool are_rates(const SyntheticRates& rates) {
  for (std::int32_t i = 0; i < rates.count; ++i) {
    if (!rates.valid(i)) return false;
  }
  return rates.count <= kMaxDraftLen;
}

// What was decided of request b; null: it is left out. Params: of accept_step or synthetic_step.
template <class Params>
void write_result(const Params& p, std::int32_t b, const AcceptResult* result) {
  const std::int64_t at = std::int64_t{b} * kMaxStepTokens;
  p.path_len[b] = result == nullptr ? 0 : result->path_len;
  p.num_emitted[b] = result == nullptr ? 0 : result->num_emitted;
  if (result == nullptr) return;
  std::copy_n(result->path, result->path_len, p.path + at);
  std::copy_n(result->emitted, result->num_emitted, p.emitted + at);
}

}  // namespace specdec::cpu
