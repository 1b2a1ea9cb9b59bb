// As many drafts as rates say, and the target's own choice after them.
#include "algo/synthetic_acceptance.h"
#include "algo/team.h"
#include "backend/cpu/step/accept_ops.h"

namespace specdec::cpu {
namespace {

// False: the request is left out, and why is reported.
bool accept_request(const SyntheticStepParams& p, std::int32_t b, AcceptResult* result) {
  if (!has_rows(p.cu_logits, p.rows, b)) {
    report(p.exec, b, kStatusBadLength);
    return false;
  }
  const std::int32_t first = p.cu_logits[b], size = p.cu_logits[b + 1] - first;
  if (size == 0) return false;
  const DraftedTree tree{p.tokens + first, p.parents + first, size, p.seed[b],
                         std::int64_t{p.positions[first]} + 1};
  const bool drafted = is_drafted_tree(tree, p.vocab);
  const bool known = size > kMaxStepTokens || are_rates(p.rates);
  report(p.exec, b, (drafted ? 0u : kStatusBadTree) | (known ? 0u : kStatusBadLaw));
  if (!drafted || !known) return false;
  TokenId* sampled = p.sampled + first;
  const auto choose = [&](std::int32_t node, std::int32_t) { return sampled[node]; };
  accept_synthetic(SerialTeam{}, tree, p.rates, p.vocab, choose, sampled, result);
  if (result->bad_row >= 0) report(p.exec, b, kStatusNaN);
  return true;
}

}  // namespace

void synthetic_step(const SyntheticStepParams& p) {
  AcceptResult result;
  for (std::int32_t b = 0; b < p.num_requests; ++b) {
    write_result(p, b, accept_request(p, b, &result) ? &result : nullptr);
  }
}

}  // namespace specdec::cpu
