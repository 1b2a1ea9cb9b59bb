#include "backend/cpu/drafter/recurrent_drafter.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <utility>

#include "backend/cpu/drafter/layer_shape.h"
#include "backend/cpu/drafter/thread_seconds.h"
#include "backend/cpu/linear/linear_call.h"
#include "base/check.h"

namespace specdec::cpu {
namespace {

// out [rows, 2 H] = [left, right].
void join(const std::vector<float>& left, const std::vector<float>& right, std::int64_t rows,
          std::int64_t hidden, std::vector<float>* out) {
  out->resize(static_cast<std::size_t>(rows * hidden) * 2);
  for (std::int64_t r = 0; r < rows; ++r) {
    float* const row = out->data() + r * 2 * hidden;
    std::copy_n(left.data() + r * hidden, hidden, row);
    std::copy_n(right.data() + r * hidden, hidden, row + hidden);
  }
}

double seconds_between(std::chrono::steady_clock::time_point a,
                       std::chrono::steady_clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

// Whether a further pass over the search's beams, of `depth` drafts each, may pay at best.
bool wants_deeper(const BeamSearch& search, std::size_t depth, const DepthRule& rule,
                  double pass_seconds) {
  if (depth > rule.gains.size()) return true;
  double expected = 0.0;
  for (const double log_prob : search.row_log_probs()) expected += std::exp(log_prob);
  return expected * rule.gains[depth - 1] >= pass_seconds;
}

}  // namespace

RecurrentDrafter::RecurrentDrafter(std::int64_t hidden_size, std::int64_t num_scores,
                                   RecurrentLayers layers, EmbedRows embed, ScoreRows head)
    : hidden_size_(hidden_size),
      exit_dim_(layers.projection != nullptr ? layers.projection->n() : 2 * hidden_size),
      num_scores_(num_scores),
      layers_(std::move(layers)),
      embed_(std::move(embed)),
      head_(std::move(head)),
      ops_(row_ops()) {
  if (layers_.recurrence != nullptr) {
    require_shape(layers_.recurrence, "recurrence", hidden_size, 2 * hidden_size);
  }
  if (layers_.projection != nullptr) {
    require_shape(layers_.projection, "projection", exit_dim_, 2 * hidden_size);
  }
  for (const PackedLinear* block : layers_.blocks) {
    require_shape(block, "block", exit_dim_, exit_dim_);
  }
  ones_.assign(static_cast<std::size_t>(std::max(hidden_size_, exit_dim_)), 1.0f);
}

void RecurrentDrafter::start(const std::vector<const float*>& hidden,
                             const std::vector<TokenId>& tokens) {
  SPECDEC_REQUIRE(hidden.size() == tokens.size(), hidden.size(), " hidden states, ", tokens.size(),
                  " tokens");
  rows_ = static_cast<std::int64_t>(tokens.size());
  started_ = true;
  tokens_ = tokens;
  context_.resize(static_cast<std::size_t>(rows_ * hidden_size_));
  for (std::int64_t r = 0; r < rows_; ++r) {
    std::copy_n(hidden[static_cast<std::size_t>(r)], hidden_size_,
                context_.data() + r * hidden_size_);
  }
  state_.assign(static_cast<std::size_t>(rows_ * hidden_size_), 0.0f);
}

void RecurrentDrafter::score(const BeamSearch& search) {
  if (started_) {
    SPECDEC_REQUIRE(search.num_rows() == rows_, "the search has ", search.num_rows(),
                    " requests, start() had ", rows_);
    started_ = false;
  } else {
    gather(search);
  }
  advance_state();
  join(context_, state_, rows_, hidden_size_, &pair_);
  float* x = pair_.data();
  if (layers_.projection != nullptr) {
    features_.resize(static_cast<std::size_t>(rows_ * exit_dim_));
    run_linear(*layers_.projection, rows_view(x, rows_, 2 * hidden_size_),
               rows_view(features_.data(), rows_, exit_dim_));
    x = features_.data();
  }
  delta_.resize(static_cast<std::size_t>(rows_ * exit_dim_));
  for (const PackedLinear* block : layers_.blocks) {
    run_linear(*block, rows_view(x, rows_, exit_dim_), rows_view(delta_.data(), rows_, exit_dim_));
    apply_silu(exit_dim_, delta_.data());
    ops_.add(delta_.data(), rows_ * exit_dim_, x);
  }
  scores_.resize(static_cast<std::size_t>(rows_ * num_scores_));
  head_(x, rows_, scores_.data());
}

void RecurrentDrafter::advance(BeamSearch* search, const TokenId* token_ids) const {
  SPECDEC_REQUIRE(!started_ && search->num_rows() == rows_, "score() comes before advance()");
  search->advance(scores_.data(), num_scores_, static_cast<std::int32_t>(num_scores_), token_ids);
}

SearchCost RecurrentDrafter::run(BeamSearch* search, const TokenId* token_ids,
                                 const DepthRule& rule) {
  using Clock = std::chrono::steady_clock;
  SearchCost cost;
  double pass_seconds = rule.pass_seconds;
  const Clock::time_point begin = Clock::now();
  Clock::time_point passed = begin;
  while (search->num_rows() > 0) {
    const double before = thread_seconds();
    score(*search);
    cost.network_thread_seconds += thread_seconds() - before;
    cost.network_seconds += seconds_between(passed, Clock::now());
    cost.rows += rows_;
    ++cost.passes;
    advance(search, token_ids);
    passed = Clock::now();
    cost.seconds = seconds_between(begin, passed);
    if (pass_seconds == 0.0) pass_seconds = cost.seconds;
    const auto depth = static_cast<std::size_t>(cost.passes);
    if (!wants_deeper(*search, depth, rule, pass_seconds)) break;
  }
  return cost;
}

// The rows of the next depth: each takes over what the row that it extends had.
void RecurrentDrafter::gather(const BeamSearch& search) {
  const std::int64_t rows = search.num_rows();
  next_context_.resize(static_cast<std::size_t>(rows * hidden_size_));
  next_state_.resize(static_cast<std::size_t>(rows * hidden_size_));
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t from = search.row_parents()[static_cast<std::size_t>(r)];
    SPECDEC_REQUIRE(from < rows_, "row ", r, " of the search extends row ", from, " of ", rows_,
                    ": score() every depth");
    std::copy_n(context_.data() + from * hidden_size_, hidden_size_,
                next_context_.data() + r * hidden_size_);
    std::copy_n(state_.data() + from * hidden_size_, hidden_size_,
                next_state_.data() + r * hidden_size_);
  }
  context_.swap(next_context_);
  state_.swap(next_state_);
  tokens_.assign(search.row_tokens().begin(), search.row_tokens().end());
  rows_ = rows;
}

void RecurrentDrafter::advance_state() {
  embedding_.resize(static_cast<std::size_t>(rows_ * hidden_size_));
  embed_(tokens_.data(), rows_, embedding_.data());
  if (layers_.recurrence == nullptr) {
    ops_.add(embedding_.data(), rows_ * hidden_size_, state_.data());
    return;
  }
  join(embedding_, state_, rows_, hidden_size_, &pair_);
  run_linear(*layers_.recurrence, rows_view(pair_.data(), rows_, 2 * hidden_size_),
             rows_view(state_.data(), rows_, hidden_size_));
  apply_silu(hidden_size_, state_.data());
}

void RecurrentDrafter::apply_silu(std::int64_t n, float* x) {
  for (std::int64_t r = 0; r < rows_; ++r) {
    ops_.silu_mul_f32(x + r * n, ones_.data(), n, x + r * n);
  }
}

}  // namespace specdec::cpu
