// A target and a drafter that are tables over the last two tokens, behind the real executor: small
// enough that the joint law of several tokens is known exactly.
//
// The target's token before a row is its parent in the tree; the one before the root is read from
// the page where its K/V lies, so a stale slot or a wrong path changes the law.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "backend/backend.h"
#include "engine/executor.h"

namespace specdec::testing {

inline constexpr int kVocab = 5, kTokens = 4, kCells = 625;
inline constexpr int kPageSize = 4, kHeadDim = 8, kBatch = 250;

// Numbers [before, last, next].
struct Table {
  std::vector<double> at = std::vector<double>(kVocab * kVocab * kVocab);
  double* row(int before, int last) { return at.data() + (before * kVocab + last) * kVocab; }
};

struct World {
  Table scores;  // of the target
  Table drafts;  // probabilities of the drafter
  std::vector<TokenId> prompt = {0, 3, 1, 4, 2};

  explicit World(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    for (double& score : scores.at) score = 1.2 * normal(random);
    for (int before = 0; before < kVocab; ++before) {
      for (int last = 0; last < kVocab; ++last) {
        double total = 0.0;
        for (int v = 0; v < kVocab; ++v) {
          total += drafts.row(before, last)[v] =
              std::exp(scores.row(before, last)[v] + normal(random));
        }
        for (int v = 0; v < kVocab; ++v) drafts.row(before, last)[v] /= total;
      }
    }
  }

  // Exact probabilities of all texts of kTokens tokens at temperature 1, the first most
  // significant.
  std::vector<double> joint_law() {
    std::vector<double> law = {1.0};
    for (int place = 0; place < kTokens; ++place) {
      std::vector<double> longer;
      for (int text = 0; text < static_cast<int>(law.size()); ++text) {
        const int last = place > 0 ? text % kVocab : prompt.back();
        const int before = place > 1 ? text / kVocab % kVocab : prompt[prompt.size() - 2 + place];
        double total = 0.0;
        for (int v = 0; v < kVocab; ++v) total += std::exp(scores.row(before, last)[v]);
        for (int v = 0; v < kVocab; ++v) {
          longer.push_back(law[text] * std::exp(scores.row(before, last)[v]) / total);
        }
      }
      law = longer;
    }
    return law;
  }
};

// How drafts are drawn.
struct Drafting {
  std::vector<std::int32_t> parents;  // -1: the golden token
  bool filtered = false;  // draws from a sharpened law and reports the raw one: a drafter's mistake
};

class Run {
 public:
  Run(World& world, const Drafting& drafting) : world_(world), drafting_(drafting) {
    const int pages = kBatch * 6;
    k_.assign(static_cast<std::size_t>(pages) * kPageSize * kHeadDim, -1.0f);
    v_ = k_;
    KvCacheView cache;
    cache.k = k_.data();
    cache.v = v_.data();
    cache.dtype = DType::kF32;
    cache.num_layers = cache.num_kv_heads = 1;
    cache.num_pages = pages;
    cache.page_size = kPageSize;
    cache.head_dim = kHeadDim;
    cache.stride_token = kHeadDim;
    cache.stride_head = cache.stride_page = kPageSize * kHeadDim;
    cache.stride_layer = static_cast<std::int64_t>(pages) * cache.stride_page;
    ExecutorConfig config;
    config.vocab_size = kVocab;
    config.max_batch_size = kBatch;
    config.max_seq_len = 12;
    config.max_num_tokens = kBatch * 12;
    config.num_pages = pages;
    config.page_size = kPageSize;
    config.method = DraftMethod::kProposed;
    config.proposed_max_draft_len = static_cast<int>(drafting.parents.size());
    config.proposed_max_path = config.proposed_max_draft_len;
    executor_ = std::make_unique<Executor>(config);
    executor_->run_on_host(cache, cpu_backend());
  }

  // How often each text was delivered, over `draws` requests with seeds of their own.
  std::vector<std::int64_t> counts(int draws) {
    std::vector<std::int64_t> counts(kCells);
    std::map<RequestId, std::vector<TokenId>> texts;
    int submitted = 0;
    while (submitted < draws || !texts.empty()) {
      while (submitted < draws && texts.size() < kBatch) {
        RequestParams params;
        params.prompt = world_.prompt;
        params.max_tokens = kTokens;
        params.sampling.temperature = 1.0f;
        params.acceptance.rule = AcceptanceRule::kRejection;
        params.seed = 0x9E3779B97F4A7C15u * static_cast<std::uint64_t>(++submitted);
        texts[executor_->submit(std::move(params))];
      }
      for (const auto& [id, text] : texts) {
        if (!text.empty()) propose(id, text);
      }
      executor_->plan();
      const StepPlan* plan = executor_->build();
      forward(*plan);
      executor_->commit(*plan, nullptr, scores_.data(), kVocab);
      for (const StepOutput& out : executor_->deliver()) {
        std::vector<TokenId>& text = texts[out.request_id];
        text.insert(text.end(), out.tokens.begin(), out.tokens.end());
        accepted_ += out.num_accepted;
        if (out.finish_reason == FinishReason::kNone) continue;
        int cell = 0;
        for (const TokenId token : text) cell = cell * kVocab + token;
        ++counts.at(text.size() == kTokens ? cell : kCells);
        texts.erase(out.request_id);
      }
    }
    return counts;
  }

  std::int64_t accepted() const { return accepted_; }

 private:
  float& stored(const StepPlan& plan, int b, int slot) {
    const int page = plan.page_table[b * plan.page_table_stride + slot / kPageSize];
    return k_[static_cast<std::size_t>(page * kPageSize + slot % kPageSize) * kHeadDim];
  }

  void forward(const StepPlan& plan) {
    scores_.resize(static_cast<std::size_t>(plan.num_logit_rows) * kVocab);
    for (int b = 0; b < plan.num_requests; ++b) {
      const int first = plan.cu_rows[b];
      for (int row = first; row < plan.cu_rows[b + 1]; ++row) {
        stored(plan, b, plan.kv_len[b] + row - first) = static_cast<float>(plan.tokens[row]);
      }
      for (int l = plan.cu_logits[b]; l < plan.cu_logits[b + 1]; ++l) {
        const int row = plan.logit_rows[l];
        // A chain's rows lie one behind the other; so does the root behind the cache.
        const int parent = plan.is_tree[b] != 0 ? plan.parents[row] : row - first - 1;
        const int slot = plan.kv_len[b] + (parent < 0 ? -1 : parent);
        const double* from =
            world_.scores.row(static_cast<int>(stored(plan, b, slot)), plan.tokens[row]);
        for (int v = 0; v < kVocab; ++v) scores_[l * kVocab + v] = static_cast<float>(from[v]);
      }
    }
  }

  void propose(RequestId id, const std::vector<TokenId>& text) {
    const std::vector<std::int32_t>& parents = drafting_.parents;
    std::vector<TokenId> tokens;
    std::vector<float> probs;
    for (std::size_t i = 0; i < parents.size(); ++i) {
      std::vector<TokenId> context = {
          text.size() > 1 ? text[text.size() - 2] : world_.prompt.back(), text.back()};
      std::vector<TokenId> above;
      for (int at = parents[i]; at >= 0; at = parents[at]) above.push_back(tokens[at]);
      context.insert(context.end(), above.rbegin(), above.rend());
      const double* q = world_.drafts.row(context[context.size() - 2], context.back());
      std::vector<double> weights(q, q + kVocab);
      probs.insert(probs.end(), q, q + kVocab);
      for (std::size_t j = 0; j < i; ++j) {
        if (parents[j] == parents[i]) weights[tokens[j]] = 0.0;
      }
      if (drafting_.filtered) {
        for (double& weight : weights) weight *= weight;
      }
      tokens.push_back(
          std::discrete_distribution<TokenId>(weights.begin(), weights.end())(random_));
    }
    ProposedProbs proposed;
    proposed.data = probs.data();
    proposed.rows = static_cast<std::int32_t>(tokens.size());
    proposed.row_stride = proposed.columns = kVocab;
    executor_->propose(id, tokens, parents, proposed);
  }

  World& world_;
  Drafting drafting_;
  std::mt19937_64 random_{4};
  std::vector<float> k_, v_, scores_;
  std::unique_ptr<Executor> executor_;
  std::int64_t accepted_ = 0;
};

// Whether counts are rejected as draws from the law at p < 1e-6; cells of expectation below 5 are
// pooled.
inline bool rejected(const std::vector<std::int64_t>& counts, const std::vector<double>& law) {
  double draws = 0.0;
  for (const std::int64_t count : counts) draws += static_cast<double>(count);
  double statistic = 0.0, pooled = 0.0, pooled_law = 0.0;
  int cells = 0;
  auto add = [&](double observed, double expected) {
    statistic += (observed - expected) * (observed - expected) / expected;
    ++cells;
  };
  for (std::size_t i = 0; i < law.size(); ++i) {
    if (law[i] * draws >= 5.0) {
      add(static_cast<double>(counts[i]), law[i] * draws);
    } else {
      pooled += static_cast<double>(counts[i]);
      pooled_law += law[i];
    }
  }
  if (pooled_law * draws >= 5.0) add(pooled, pooled_law * draws);
  // Wilson and Hilferty's quantile; 4.753 is the normal one of 1e-6.
  const double degrees = cells - 1, spread = 2.0 / (9.0 * degrees);
  return statistic > degrees * std::pow(1.0 - spread + 4.753 * std::sqrt(spread), 3.0);
}

}  // namespace specdec::testing
