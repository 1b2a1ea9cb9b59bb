#include "algo/acceptance.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace specdec {
namespace {

double accept_uniform(const AcceptanceInput& input, std::int64_t position, int sibling) {
  return philox_uniform(input.seed, static_cast<std::uint64_t>(position), RandomPurpose::kAccept,
                        static_cast<std::uint32_t>(sibling));
}

TokenId most_likely(const WeightedLaw& law) {
  return static_cast<TokenId>(std::max_element(law.weights, law.weights + law.vocab_size) -
                              law.weights);
}

// -sum p log p, with p = w / total and log w = (score - best) / temperature where w > 0.
double entropy(const WeightedLaw& law, const float* scores, float temperature) {
  float best = -std::numeric_limits<float>::infinity();
  for (std::int32_t v = 0; v < law.vocab_size; ++v) best = std::max(best, scores[v]);
  double sum = 0.0;
  for (std::int32_t v = 0; v < law.vocab_size; ++v) {
    if (law.weights[v] <= 0.0f || scores[v] == best) continue;
    sum +=
        static_cast<double>(law.weights[v]) * static_cast<double>((scores[v] - best) / temperature);
  }
  return std::log(law.total) - sum / law.total;
}

}  // namespace

int TreeAcceptor::children(const DraftTree& tree, std::int32_t node) {
  int count = 0;
  for (std::int32_t i = node + 1; i < tree.size; ++i) {
    if (tree.parents[i] == node) children_[count++] = i;
  }
  return count;
}

int TreeAcceptor::hold_against(const AcceptanceInput& input, std::int64_t position, int count,
                               WeightedLaw* law) {
  const DraftTree& tree = *input.tree;
  const TokenId favourite = fault(Fault::kArgmaxMatch) ? most_likely(*law) : -1;
  for (int i = 0; i < count; ++i) {
    const std::int32_t node = children_[i];
    const DraftLaw q = input.probs->law(input.source[node]);
    const bool remove = !input.probs->replacement && !fault(Fault::kSiblingNotRemoved);
    const double mass = draft_mass(q, columns_, remove ? i : 0);
    columns_[i] = q.column;
    const double wanted = static_cast<double>(q.probs[q.column]) / mass * law->total;
    const auto weight = static_cast<double>(law->weights[tree.tokens[node]]);
    bool kept = accept_uniform(input, position, i) * wanted < weight;
    if (fault(Fault::kAlwaysAccept)) kept = true;
    if (fault(Fault::kConstantThreshold)) kept = 0.5 * wanted < weight;
    if (fault(Fault::kArgmaxMatch)) kept = tree.tokens[node] == favourite;
    if (kept) return i;
    if (fault(Fault::kResampleFromTarget)) continue;
    if (fault(Fault::kResidualNotUpdated) && i + 1 < count) continue;
    subtract_draft(SerialTeam{}, q, mass, law);
    // Nothing left: r was q up to rounding, so the draft is as good as a draw from r.
    if (!(law->total > 0.0)) return i;
  }
  return -1;
}

TokenId TreeAcceptor::draw_rest(const AcceptanceInput& input, std::int64_t position,
                                const WeightedLaw& law) {
  WeightedLaw rest = law;
  if (fault(Fault::kSoftmaxOfResidual)) {
    const double total = rest.total;
    for (std::int32_t v = 0; v < rest.vocab_size; ++v) {
      rest.weights[v] = static_cast<float>(std::exp(static_cast<double>(rest.weights[v]) / total));
    }
    sum_law(SerialTeam{}, &rest);
  }
  const double u = fault(Fault::kSharedUniform)
                       ? accept_uniform(input, position, 0)
                       : token_uniform(input.seed, static_cast<std::uint64_t>(position));
  return draw_from_law(rest, u);
}

void TreeAcceptor::judge(const AcceptanceInput& input, const AcceptanceParams& params,
                         const float* scores, std::int32_t node, int count,
                         const WeightedLaw& law) {
  const DraftTree& tree = *input.tree;
  const bool typical = params.rule == AcceptanceRule::kTypical;
  double least = static_cast<double>(params.threshold);
  if (typical) {
    const double spread = std::exp(-entropy(law, scores, input.law.temperature));
    least = std::min(static_cast<double>(params.posterior_threshold),
                     static_cast<double>(params.posterior_alpha) * spread);
  }
  for (int i = 0; i < count; ++i) {
    const std::int32_t child = children_[i];
    const double p = static_cast<double>(law.weights[tree.tokens[child]]) / law.total;
    double q = 1.0;
    if (!typical && input.probs != nullptr && input.probs->given()) {
      const DraftLaw draft = input.probs->law(input.source[child]);
      q = static_cast<double>(draft.probs[draft.column]) /
          draft_mass(draft, columns_, input.probs->replacement ? 0 : i);
      columns_[i] = draft.column;
    }
    if (p > 0.0 && p >= least * q) {
      depth_[child] = depth_[node] + 1;
      score_[child] = score_[node] * p;
    }
  }
}

}  // namespace specdec
