#include "engine/host_accept.h"

#include <algorithm>

#include "algo/accept.h"
#include "base/thread_pool.h"
#include "engine/synthetic_rates.h"

namespace specdec {
namespace {

// Rows were, or are to be, changed: by the request's processors or by the caller's own.
bool has_processors(const RequestParams& params, const ScoreProcessor& processor, int num_output) {
  return processor.active(num_output) || params.processes_scores;
}

bool is_processed(const HostChoice& c) {
  return has_processors(c.params, c.processor, c.num_output) || c.masks != nullptr;
}

bool is_drawn(const HostChoice& c) { return c.drawn != nullptr && c.drawn->drawn(c.drawn_index); }

// Drafts are held against their own probabilities.
bool by_probability(const HostChoice& c) {
  const AcceptanceRule rule = c.params.acceptance.rule;
  if (c.params.sampling.greedy() || rule == AcceptanceRule::kExactMatch || c.tree.size == 1) {
    return false;
  }
  return rule != AcceptanceRule::kRejection || (c.probs != nullptr && c.probs->given()) ||
         is_drawn(c);
}

// Whether the best token of all is what a mask allows, and nothing but masks changes scores: then
// it is the best of those allowed, too, and their scores need not be read.
bool is_best_allowed(const HostChoice& c, int row, const float* scores) {
  if (c.best == nullptr || c.best[row] < 0 || c.masks == nullptr) return false;
  return !c.processor.active(c.num_output) && c.masks->allows(row, c.best[row]) &&
         scores[c.best[row]] != kForbiddenScore;
}

}  // namespace

// The scores of one row after the request's processors, as plain decoding would have had them
// there.
const float* HostAcceptor::processed(const HostChoice& c, int row, const float* raw) {
  const bool active = c.processor.active(c.num_output);
  if (!active && c.masks == nullptr) return raw;
  processed_row_.resize(vocab_size_);
  if (c.masks == nullptr) {
    std::copy_n(raw, vocab_size_, processed_row_.data());
  } else {
    apply_token_mask(c.masks->row(row), vocab_size_, raw, processed_row_.data());
  }
  if (!active) return processed_row_.data();
  TokenId path_tokens[kMaxStepTokens];
  std::int32_t path[kMaxStepTokens];
  const int path_len = row == 0 ? 0 : derive_path(c.tree.parents, row, path);
  for (int i = 0; i < path_len; ++i) path_tokens[i] = c.tree.tokens[path[i]];
  c.processor.apply(processed_row_.data(), c.history, c.history_len, path_tokens, path_len);
  return processed_row_.data();
}

// Best tokens of rows of scores.
void HostAcceptor::find_best(const float* scores, std::int64_t row_stride, int rows, TokenId* ids) {
  ArgmaxParams params;
  params.scores = scores;
  params.row_stride = row_stride;
  params.rows = rows;
  params.vocab = vocab_size_;
  params.ids = ids;
  cpu_backend().argmax(params);
}

// The same of all of a request's rows, as the model gave their scores.
void HostAcceptor::find_unchanged(const HostChoice& c, const float* scores, std::int64_t row_stride,
                                  TokenId* ids) {
  if (c.best == nullptr) return find_best(scores, row_stride, c.tree.size, ids);
  std::copy_n(c.best, c.tree.size, ids);
}

// The target's choice after each of the request's rows: the best token, or one drawn by the
// request's law. Drawn tokens depend on the seed and their position alone (algo/sample.h), so the
// drafts that equal them are what plain sampling would have said, and are accepted as greedy ones
// are.
void HostAcceptor::sample(const HostChoice& c, const float* scores, std::int64_t row_stride,
                          TokenId* sampled) {
  const DraftTree& tree = c.tree;
  const SamplingLaw& law = c.params.sampling;
  const bool changed = is_processed(c);
  // The best tokens of drawn rows are of use to drafters alone.
  if (!changed && (law.greedy() || c.feeds_drafter)) {
    find_unchanged(c, scores, row_stride, sampled);
    if (law.greedy()) return;
  }
  std::int32_t depth[kMaxStepTokens] = {};  // of a row on a path of accepted drafts, else -1
  for (int row = 0; row < tree.size; ++row) {
    if (row > 0) {
      const std::int32_t parent = tree.parents[row];
      const bool kept = depth[parent] >= 0 && tree.tokens[row] == sampled[parent];
      depth[row] = kept ? depth[parent] + 1 : -1;
    }
    if (depth[row] < 0 && !c.feeds_drafter) {
      sampled[row] = -1;  // nobody looks at it
      continue;
    }
    if (law.greedy() && is_best_allowed(c, row, scores + row * row_stride)) {
      sampled[row] = c.best[row];
      continue;
    }
    const float* row_scores = processed(c, row, scores + row * row_stride);
    // Other rows are never delivered; drafters look at their best token.
    if (!law.greedy() && depth[row] >= 0) {
      if (row == 0 && c.root_draw != kNotDrawn) {
        sampled[row] = c.root_draw;
        continue;
      }
      const double u = token_uniform(c.params.seed, c.history_len + depth[row]);
      sampled[row] = sampler_.draw(row_scores, vocab_size_, law, u);
      continue;
    }
    if (!changed) continue;
    find_best(row_scores, vocab_size_, 1, sampled + row);
    // All tokens forbidden: there is nothing to choose, which is an error of its own.
    if (sampled[row] >= 0 && row_scores[sampled[row]] == kForbiddenScore) {
      sampled[row] = kNothingAllowed;
    }
  }
}

bool HostAcceptor::draws_root(const RequestParams& params, const ScoreProcessor& processor,
                              int num_output, int tree_size) const {
  if (params.sampling.greedy() || params.grammar) return false;
  if (has_processors(params, processor, num_output)) return false;
  return tree_size == 1 || (params.acceptance.rule == AcceptanceRule::kExactMatch &&
                            (synthetic_rates_.empty() || !params.speculative));
}

void HostAcceptor::draw_roots(std::vector<RootDraw>& draws) {
  ThreadPool& pool = ThreadPool::global();
  const ThreadPool::Hold threads(pool);
  of_threads_.resize(static_cast<std::size_t>(pool.size()));
  pool.run_items(static_cast<std::int64_t>(draws.size()), vocab_size_, [&](Range range, int rank) {
    for (std::int64_t i = range.begin; i < range.end; ++i) {
      RootDraw& draw = draws[static_cast<std::size_t>(i)];
      draw.token = of_threads_[static_cast<std::size_t>(rank)].draw(draw.scores, vocab_size_,
                                                                    draw.law, draw.u);
    }
  });
}

// As sample(), by the request's rule and the probabilities of its drafts (algo/acceptance.h).
void HostAcceptor::accept_by_probability(const HostChoice& c, const float* scores,
                                         std::int64_t row_stride, TokenId* sampled,
                                         AcceptResult* accepted) {
  auto scores_of = [&](std::int32_t node) {
    return processed(c, node, scores + node * row_stride);
  };
  for (std::int32_t node = 0; c.feeds_drafter && node < c.tree.size; ++node) {
    find_best(scores_of(node), vocab_size_, 1, sampled + node);
  }
  AcceptanceInput input;
  input.tree = &c.tree;
  input.probs = c.probs != nullptr && c.probs->given() ? c.probs : nullptr;
  input.source = c.source;
  if (input.probs != nullptr && c.masks != nullptr && c.uncut != nullptr) {
    cut_probs_.fill(c.tree, *c.masks, c.source, c.probs->rows.data(), c.probs->columns,
                    c.probs->ids.empty() ? nullptr : c.probs->ids.data(), /*ids_of_each=*/false);
    cut_probs_.probs.ids = c.probs->ids;
    cut_probs_.probs.replacement = c.probs->replacement;
    input.probs = &cut_probs_.probs;
    input.source = cut_probs_.source.data();
  }
  input.law = c.params.sampling;
  input.seed = c.params.seed;
  input.position = c.history_len;
  acceptor_.accept(input, c.params.acceptance, vocab_size_, scores_of, sampler_, sampled, accepted);
}

// The same for drafts that operations made, by the operation that accepts them on a device.
void HostAcceptor::accept_drawn(const HostChoice& c, const float* scores, std::int64_t row_stride,
                                TokenId* sampled, AcceptResult* accepted) {
  const std::int32_t size = c.tree.size;
  if (c.processor.active(c.num_output) || c.masks != nullptr) {
    processed_rows_.resize(static_cast<std::size_t>(size) * vocab_size_);
    for (std::int32_t node = 0; node < size; ++node) {
      const float* row = processed(c, node, scores + node * row_stride);
      std::copy_n(row, vocab_size_,
                  processed_rows_.data() + static_cast<std::ptrdiff_t>(node) * vocab_size_);
    }
    scores = processed_rows_.data();
    row_stride = vocab_size_;
  }
  std::int32_t positions[kMaxStepTokens];
  derive_depths(c.tree.parents, size, positions);
  for (std::int32_t i = 0; i < size; ++i) positions[i] += c.history_len - 1;
  const std::int32_t cu_logits[2] = {0, size};
  const SamplingLaw& law = c.params.sampling;
  const AcceptanceParams& rule = c.params.acceptance;
  const auto rule_byte = static_cast<std::uint8_t>(rule.rule);
  const StepDraftProbs& drawn = *c.drawn;
  const std::ptrdiff_t at = std::ptrdiff_t{c.drawn_index} * drawn.drafts_each;
  AcceptStepParams p;
  p.rows.scores = scores;
  p.rows.row_stride = row_stride;
  p.rows.rows = size;
  p.rows.vocab = vocab_size_;
  p.rows.num_requests = 1;
  p.rows.cu_logits = cu_logits;
  p.rows.positions = positions;
  p.sampling = {&law.temperature, &law.top_k, &law.top_p, &law.min_p, &c.params.seed};
  p.tokens = c.tree.tokens;
  p.parents = c.tree.parents;
  p.rule = &rule_byte;
  p.posterior_threshold = &rule.posterior_threshold;
  p.posterior_alpha = &rule.posterior_alpha;
  p.threshold = &rule.threshold;
  p.probs = drawn.probs + at * drawn.columns;
  p.probs_stride = p.columns = drawn.columns;
  p.drafts_each = drawn.drafts_each;
  p.own_ids = drawn.own_ids;
  p.vocab_ids = drawn.vocab_ids == nullptr || !drawn.own_ids ? drawn.vocab_ids
                                                             : drawn.vocab_ids + at * drawn.columns;
  if (drawn.draft_columns != nullptr) p.draft_columns = drawn.draft_columns + at;
  if (drawn.replacement != nullptr) p.replacement = drawn.replacement + c.drawn_index;
  if (c.masks != nullptr && c.uncut != nullptr) {
    const TokenId* ids = p.vocab_ids;
    cut_probs_.fill(c.tree, *c.masks, c.uncut, p.probs, drawn.columns, ids,
                    ids != nullptr && drawn.own_ids);
    p.probs = cut_probs_.probs.rows.data();
    p.drafts_each = c.tree.num_drafts();
    if (p.own_ids) p.vocab_ids = cut_probs_.own_ids.data();
    p.draft_columns = cut_probs_.probs.column.data();
  }
  p.sampled = sampled;
  p.path = accepted->path;
  p.path_len = &accepted->path_len;
  p.emitted = accepted->emitted;
  p.num_emitted = &accepted->num_emitted;
  cpu_backend().accept_step(p);
}

// Keeps as many drafts as the rates say (algo/synthetic_acceptance.h). The work is that of exact
// match: every row's best token, and a draw for each row on the path.
void HostAcceptor::accept_synthetic(const HostChoice& c, const float* scores,
                                    std::int64_t row_stride, TokenId* sampled,
                                    AcceptResult* accepted) {
  const DraftTree& tree = c.tree;
  const SamplingLaw& law = c.params.sampling;
  const DraftedTree drafted{tree.tokens, tree.parents, tree.size, c.params.seed, c.history_len};
  auto scores_of = [&](std::int32_t node) {
    return processed(c, node, scores + node * row_stride);
  };
  const bool changed = is_processed(c);
  if (scores != nullptr && !changed) find_unchanged(c, scores, row_stride, sampled);
  for (std::int32_t node = 0; scores != nullptr && changed && node < tree.size; ++node) {
    find_best(scores_of(node), vocab_size_, 1, sampled + node);
  }
  const auto choose = [&](std::int32_t node, std::int32_t depth) -> TokenId {
    if (scores == nullptr || (law.greedy() && !changed) || sampled[node] < 0) {
      return sampled[node];
    }
    const float* row = scores_of(node);
    if (law.greedy()) {
      return row[sampled[node]] == kForbiddenScore ? kNothingAllowed : sampled[node];
    }
    return sampler_.draw(row, vocab_size_, law, token_uniform_at(drafted, depth));
  };
  specdec::accept_synthetic(SerialTeam{}, drafted, view_of(synthetic_rates_), vocab_size_, choose,
                            sampled, accepted);
}

void HostAcceptor::decide(const HostChoice& c, const float* scores, std::int64_t row_stride,
                          TokenId* sampled, AcceptResult* accepted) {
  if (!synthetic_rates_.empty() && c.params.speculative && c.tree.size > 1) {
    accept_synthetic(c, scores, row_stride, sampled, accepted);
  } else if (by_probability(c) && is_drawn(c)) {
    accept_drawn(c, scores, row_stride, sampled, accepted);
  } else if (by_probability(c)) {
    accept_by_probability(c, scores, row_stride, sampled, accepted);
  } else {
    if (scores != nullptr) sample(c, scores, row_stride, sampled);
    accept_greedy(SerialTeam{}, c.tree.tokens, c.tree.parents, c.tree.size, sampled, kMaxDraftLen,
                  accepted);
    return;
  }
  // The tokens along the path, up to the first row that has none.
  accepted->num_emitted = 0;
  for (std::int32_t i = 0; i <= accepted->path_len; ++i) {
    const TokenId token = sampled[i == 0 ? 0 : accepted->path[i - 1]];
    if (token < 0) break;
    accepted->emitted[accepted->num_emitted++] = token;
  }
}

}  // namespace specdec
