#include "engine/score_processor.h"

#include <algorithm>
#include <cmath>

namespace specdec {
ScoreProcessor::ScoreProcessor(const RequestParams& params, int vocab_size)
    : params_(params.processors), vocab_size_(vocab_size), min_tokens_(params.min_tokens) {
  if (!params.ignore_eos) min_tokens_banned_ = params.eos_token_ids;
  min_tokens_banned_.insert(min_tokens_banned_.end(), params.stop_token_ids.begin(),
                            params.stop_token_ids.end());
  static_processors_ = params_.any();
  penalties_ = params_.repetition_penalty != 1.0f || params_.presence_penalty != 0.0f ||
               params_.frequency_penalty != 0.0f;
  if (!params_.allowed_token_ids.empty()) {
    allowed_.assign(vocab_size, 0);
    for (TokenId id : params_.allowed_token_ids) allowed_[id] = 1;
  }
  if (penalties_) {
    output_count_.assign(vocab_size, 0);
    seen_.assign(vocab_size, 0);
    for (TokenId id : params.prompt) {
      if (!seen_[id]) distinct_.push_back(id);
      seen_[id] = 1;
    }
  }
}

void ScoreProcessor::append(TokenId token) {
  ++num_output_;
  if (!penalties_) return;
  if (!seen_[token]) distinct_.push_back(token);
  seen_[token] = 1;
  ++output_count_[token];
}

void ScoreProcessor::apply(float* scores, const TokenId* history, int history_len,
                           const TokenId* path, int path_len) const {
  if (!allowed_.empty()) {
    for (int id = 0; id < vocab_size_; ++id) {
      if (!allowed_[id]) scores[id] = kForbiddenScore;
    }
  }
  if (!params_.bad_words.empty()) apply_bad_words(scores, history, history_len, path, path_len);
  if (num_output_ + path_len < min_tokens_) {
    for (TokenId id : min_tokens_banned_) scores[id] = kForbiddenScore;
  }
  for (const auto& [id, bias] : params_.logit_bias) scores[id] += bias;
  if (penalties_) apply_penalties(scores, path, path_len);
}

void ScoreProcessor::apply_bad_words(float* scores, const TokenId* history, int history_len,
                                     const TokenId* path, int path_len) const {
  const int total = history_len + path_len;
  auto token_at = [&](int i) { return i < history_len ? history[i] : path[i - history_len]; };
  for (const std::vector<TokenId>& word : params_.bad_words) {
    const int prefix = static_cast<int>(word.size()) - 1;
    if (prefix > total) continue;
    bool match = true;
    for (int i = 0; i < prefix && match; ++i) match = token_at(total - prefix + i) == word[i];
    if (match) scores[word.back()] = kForbiddenScore;
  }
}

void ScoreProcessor::apply_penalties(float* scores, const TokenId* path, int path_len) const {
  auto penalise = [&](TokenId id, int count) {
    float score = scores[id];
    if (params_.repetition_penalty != 1.0f) {
      score =
          score > 0.0f ? score / params_.repetition_penalty : score * params_.repetition_penalty;
    }
    score -= params_.frequency_penalty * static_cast<float>(count);
    if (count > 0) score -= params_.presence_penalty;
    scores[id] = score;
  };
  auto on_path = [&](TokenId id, int end) { return std::count(path, path + end, id); };
  for (TokenId id : distinct_) {
    penalise(id, output_count_[id] + static_cast<int>(on_path(id, path_len)));
  }
  for (int i = 0; i < path_len; ++i) {
    const bool first_on_path = on_path(path[i], i) == 0;
    if (first_on_path && !seen_[path[i]]) {
      penalise(path[i], static_cast<int>(on_path(path[i], path_len)));
    }
  }
}

TokenLogprobs compute_logprobs(const float* scores, int vocab_size, TokenId token, int num_top) {
  float best = kForbiddenScore;
  for (int id = 0; id < vocab_size; ++id) best = std::max(best, scores[id]);
  double sum = 0.0;
  for (int id = 0; id < vocab_size; ++id) {
    sum += std::exp(static_cast<double>(scores[id]) - static_cast<double>(best));
  }
  const double log_total = static_cast<double>(best) + std::log(sum);
  auto logprob = [&](TokenId id) {
    return static_cast<float>(static_cast<double>(scores[id]) - log_total);
  };
  TokenLogprobs out;
  out.logprob = logprob(token);
  out.rank = 1;
  for (int id = 0; id < vocab_size; ++id) out.rank += scores[id] > scores[token];
  const int top = std::min(num_top, vocab_size);
  if (top > 0) {
    std::vector<TokenId> ids(vocab_size);
    for (int id = 0; id < vocab_size; ++id) ids[id] = id;
    // NaN last: an order needs a place for everything.
    auto better = [&](TokenId a, TokenId b) {
      const bool a_is_nan = std::isnan(scores[a]), b_is_nan = std::isnan(scores[b]);
      if (a_is_nan || b_is_nan) return a_is_nan == b_is_nan ? a < b : b_is_nan;
      return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    };
    std::partial_sort(ids.begin(), ids.begin() + top, ids.end(), better);
    for (int i = 0; i < top; ++i) out.top.emplace_back(ids[i], logprob(ids[i]));
  }
  return out;
}

}  // namespace specdec
