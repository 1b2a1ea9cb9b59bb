// Prompt lookup as a Drafter: the index of algo/ngram_index.h over the request's own history, the
// public pool if the engine has one, and what is known about how far such drafts are right.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "algo/ngram_index.h"
#include "algo/shared_ngram_pool.h"
#include "engine/chain_budget.h"
#include "engine/drafter.h"

namespace specdec {

struct NgramParams {
  int max_draft_len = 4;
  int max_matching_ngram_size = 2;
  bool is_keep_all = true;
  bool is_use_oldest = true;
  bool is_public_pool = false;
};

class PromptLookupDrafter final : public Drafter {
 public:
  // `max_len`: the request's history never grows beyond this; it sizes the index.
  // `shared_rates`, `pool`: the executor's, outlive this object; pool may be null (not public).
  PromptLookupDrafter(const NgramParams& params, int max_len, ChainRates* shared_rates,
                      SharedNgramPool* pool, std::string cache_salt);

  void begin(const std::vector<TokenId>& history) override;
  int offer(const std::vector<TokenId>& history, const DraftLimits& limits,
            const BudgetContext& budget) override;
  const double* survival() const override { return survival_.data(); }
  void build(const std::vector<TokenId>& history, int num_drafts, DraftTree* tree) override;
  void update(const std::vector<TokenId>& history, int num_new, const DraftTree& tree,
              const TokenId* sampled) override;
  void end(const std::vector<TokenId>& history) override;
  std::size_t memory_bytes() const override;

 private:
  NgramIndex* index() { return reinterpret_cast<NgramIndex*>(block_.data()); }
  void extend(const std::vector<TokenId>& history, int publish_from);
  void look_up(const std::vector<TokenId>& history);

  NgramParams params_;
  int max_len_;
  ChainRates* shared_rates_;
  SharedNgramPool* pool_;
  std::string cache_salt_;
  std::vector<std::uint64_t> block_;  // the NgramIndex and its tables
  std::int32_t published_ = 0;        // tokens of the history that the pool has

  // The draft thought of in offer(), kept until update() has seen whether it was right.
  std::vector<TokenId> draft_;
  std::vector<TokenId> pooled_draft_;
  std::vector<double> survival_;
  int draft_len_ = 0;
  int match_len_ = 0;  // tokens before the draft that agree with the history's end
  ChainRates rates_;
};

}  // namespace specdec
