// What is accepted of a step's drafts, and the token after them.
#include "algo/accept.h"
#include "algo/synthetic_acceptance.h"
#include "engine/executor.h"
#include "engine/executor_request.h"
#include "engine/synthetic_rates.h"

namespace specdec {

// The scores of one row after the request's processors, as plain decoding would have had them
// there.
const float* Executor::processed_scores(const Request& request, int row, const float* raw) {
  if (!request.processor.active(request.num_output())) return raw;
  TokenId path_tokens[kMaxStepTokens];
  std::int32_t path[kMaxStepTokens];
  const int path_len = row == 0 ? 0 : derive_path(request.tree.parents, row, path);
  for (int i = 0; i < path_len; ++i) path_tokens[i] = request.tree.tokens[path[i]];
  processed_row_.assign(raw, raw + config_.vocab_size);
  request.processor.apply(processed_row_.data(), request.history, path_tokens, path_len);
  return processed_row_.data();
}

// Best tokens of rows of scores.
void Executor::find_best(const float* scores, std::int64_t row_stride, int rows, TokenId* ids) {
  ArgmaxParams params;
  params.scores = scores;
  params.row_stride = row_stride;
  params.rows = rows;
  params.vocab = config_.vocab_size;
  params.ids = ids;
  backend_.argmax(params);
}

// The target's choice after each of the request's rows: the best token, or one drawn by the
// request's law. Drawn tokens depend on the seed and their position alone (algo/sample.h), so the
// drafts that equal them are what plain sampling would have said, and are accepted as greedy ones
// are.
void Executor::sample(const Request& request, const float* scores, std::int64_t row_stride,
                      TokenId* sampled) {
  const int rows = request.tree.size;
  const SamplingLaw& law = request.params.sampling;
  // By the processors of the request, or by the caller's own before commit().
  const bool processed =
      request.processor.active(request.num_output()) || request.params.needs_scores;
  if (!processed) {
    find_best(scores, row_stride, rows, sampled);
    if (law.greedy()) return;
  }
  const DraftTree& tree = request.tree;
  std::int32_t depth[kMaxStepTokens] = {};  // of a row on a path of accepted drafts, else -1
  for (int row = 0; row < rows; ++row) {
    if (row > 0) {
      const std::int32_t parent = tree.parents[row];
      const bool kept = depth[parent] >= 0 && tree.tokens[row] == sampled[parent];
      depth[row] = kept ? depth[parent] + 1 : -1;
    }
    const float* row_scores = processed_scores(request, row, scores + row * row_stride);
    // Other rows are never delivered; drafters look at their best token.
    if (!law.greedy() && depth[row] >= 0) {
      const double u = token_uniform(request.params.seed, request.history.size() + depth[row]);
      sampled[row] = sampler_.draw(row_scores, config_.vocab_size, law, u);
      continue;
    }
    if (!processed) continue;
    find_best(row_scores, config_.vocab_size, 1, sampled + row);
    // All tokens forbidden: there is nothing to choose, which is an error of its own.
    if (sampled[row] >= 0 && row_scores[sampled[row]] == kForbiddenScore) {
      sampled[row] = kNothingAllowed;
    }
  }
}

// As sample(), by the request's rule and the probabilities of its drafts (algo/acceptance.h).
void Executor::accept_by_probability(const Request& request, const float* scores,
                                     std::int64_t row_stride, TokenId* sampled) {
  const DraftTree& tree = request.tree;
  auto scores_of = [&](std::int32_t node) {
    return processed_scores(request, node, scores + node * row_stride);
  };
  if (request.drafter) {  // it looks at the best token of every row
    for (std::int32_t node = 0; node < tree.size; ++node) {
      find_best(scores_of(node), config_.vocab_size, 1, sampled + node);
    }
  }
  AcceptanceInput input;
  input.tree = &tree;
  input.probs = request.tree_has_probs ? &request.step_probs : nullptr;
  input.source = request.proposal_source;
  input.law = request.params.sampling;
  input.seed = request.params.seed;
  input.position = static_cast<std::int64_t>(request.history.size());
  acceptor_.accept(input, request.params.acceptance, config_.vocab_size, scores_of, sampler_,
                   sampled, &accepted_);
}

// Keeps as many drafts as the rates say (algo/synthetic_acceptance.h). The work is that of exact
// match: every row's best token, and a draw for each row on the path.
void Executor::accept_synthetic(const Request& request, const float* scores,
                                std::int64_t row_stride, TokenId* sampled) {
  const DraftTree& tree = request.tree;
  const SamplingLaw& law = request.params.sampling;
  const DraftedTree drafted{tree.tokens, tree.parents, tree.size, request.params.seed,
                            static_cast<std::int64_t>(request.history.size())};
  auto scores_of = [&](std::int32_t node) {
    return processed_scores(request, node, scores + node * row_stride);
  };
  const bool processed =
      request.processor.active(request.num_output()) || request.params.needs_scores;
  if (scores != nullptr && !processed) find_best(scores, row_stride, tree.size, sampled);
  for (std::int32_t node = 0; scores != nullptr && processed && node < tree.size; ++node) {
    find_best(scores_of(node), config_.vocab_size, 1, sampled + node);
  }
  const auto choose = [&](std::int32_t node, std::int32_t depth) -> TokenId {
    if (scores == nullptr || (law.greedy() && !processed) || sampled[node] < 0) {
      return sampled[node];
    }
    const float* row = scores_of(node);
    if (law.greedy()) {
      return row[sampled[node]] == kForbiddenScore ? kNothingAllowed : sampled[node];
    }
    return sampler_.draw(row, config_.vocab_size, law, token_uniform_at(drafted, depth));
  };
  specdec::accept_synthetic(SerialTeam{}, drafted, view_of(config_.synthetic_acceptance_rates),
                            config_.vocab_size, choose, sampled, &accepted_);
}

// Fills accepted_, and sampled[node] for the root and the nodes of the accepted path: the token
// that follows each. scores null: `sampled` holds the greedy choices already.
void Executor::decide(const Request& request, const float* scores, std::int64_t row_stride,
                      TokenId* sampled) {
  if (!config_.synthetic_acceptance_rates.empty() && request.params.speculative &&
      request.tree.size > 1) {
    accept_synthetic(request, scores, row_stride, sampled);
    return;
  }
  if (request.accepts_by_probability()) {
    accept_by_probability(request, scores, row_stride, sampled);
    return;
  }
  if (scores != nullptr) sample(request, scores, row_stride, sampled);
  const DraftTree& tree = request.tree;
  accept_greedy(SerialTeam{}, tree.tokens, tree.parents, tree.size, sampled, kMaxDraftLen,
                &accepted_);
}

}  // namespace specdec
