#include "algo/lookahead_host.h"

#include "base/check.h"

namespace specdec {

OwnedLookahead::OwnedLookahead(const LookaheadConfig& cfg, const std::vector<TokenId>& prompt,
                               std::uint64_t seed, std::int32_t pool_grams) {
  check_lookahead_config(cfg, "lookahead");
  SPECDEC_REQUIRE(!prompt.empty(), "lookahead.prompt is empty: give at least one token");
  for (std::size_t i = 0; i < prompt.size(); ++i) {
    SPECDEC_REQUIRE(prompt[i] >= 0, "lookahead.prompt[", i, "] = ", prompt[i],
                    ": token ids are not negative");
  }
  SPECDEC_REQUIRE(pool_grams >= 1 && pool_grams <= (1 << 26), "lookahead.pool_grams = ", pool_grams,
                  ": use 1..", 1 << 26);
  bytes_ = lookahead_bytes_required(cfg, pool_grams);
  block_ = std::make_unique<std::uint64_t[]>((bytes_ + 7) / 8);
  lookahead_init(SerialTeam{}, state(), cfg, pool_grams, prompt.data(),
                 static_cast<std::int32_t>(prompt.size()), seed);
}

const DraftTree& OwnedLookahead::draft(TokenId golden, const LookaheadBudget& budget) {
  SPECDEC_REQUIRE(golden >= 0, "lookahead.golden = ", golden, ": token ids are not negative");
  lookahead_draft(SerialTeam{}, state(), golden, budget, &tree_);
  drafted_ = true;
  return tree_;
}

void OwnedLookahead::update(const std::vector<TokenId>& sampled,
                            const std::vector<TokenId>& accepted) {
  const std::size_t expected = drafted_ ? static_cast<std::size_t>(tree_.size) : 0;
  SPECDEC_REQUIRE(sampled.size() == expected, "lookahead.sampled has ", sampled.size(),
                  " entries, the last draft has ", expected, " nodes: give one per node");
  for (std::size_t i = 0; i < accepted.size(); ++i) {
    SPECDEC_REQUIRE(accepted[i] >= 0, "lookahead.accepted[", i, "] = ", accepted[i],
                    ": token ids are not negative");
  }
  drafted_ = false;
  lookahead_update(SerialTeam{}, state(), tree_.tokens, sampled.data(), accepted.data(),
                   static_cast<std::int32_t>(accepted.size()));
}

std::vector<std::vector<TokenId>> OwnedLookahead::pool_entries(TokenId key) const {
  std::vector<std::int32_t> entries(static_cast<std::size_t>(state()->cfg.g));
  const std::int32_t count =
      lookahead_pool_lookup(SerialTeam{}, state(), key, state()->cfg.g, entries.data());
  std::vector<std::vector<TokenId>> grams;
  const std::int32_t gram_len = state()->gram_len();
  for (std::int32_t i = 0; i < count; ++i) {
    const TokenId* gram = state()->pool_grams() + std::int64_t{entries[i]} * gram_len;
    grams.emplace_back(gram, gram + gram_len);
  }
  return grams;
}

}  // namespace specdec
