#include "engine/prompt_lookup_drafter.h"

#include <algorithm>
#include <utility>

namespace specdec {
namespace {

// How far back the agreement behind a match is counted: beyond this, longer says nothing new.
constexpr int kMatchHorizon = 16;
// Text goes to the public pool in pieces of this many tokens: each piece repeats a little of what
// came before it, so that n-grams across the border are found.
constexpr int kPublishTokens = 32;

}  // namespace

PromptLookupDrafter::PromptLookupDrafter(const NgramParams& params, int max_len,
                                         ChainRates* shared_rates, SharedNgramPool* pool,
                                         std::string cache_salt)
    : params_(params),
      max_len_(max_len),
      shared_rates_(shared_rates),
      pool_(pool),
      cache_salt_(std::move(cache_salt)),
      block_((ngram_bytes_required(max_len, params.max_matching_ngram_size) + 7) / 8),
      draft_(static_cast<std::size_t>(params.max_draft_len)),
      pooled_draft_(pool == nullptr ? 0 : draft_.size()),
      survival_(static_cast<std::size_t>(params.max_draft_len)) {}

void PromptLookupDrafter::begin(const std::vector<TokenId>& history) {
  ngram_init(SerialTeam{}, index(), max_len_, params_.max_matching_ngram_size);
  extend(history, 1);
}

void PromptLookupDrafter::end(const std::vector<TokenId>& history) { extend(history, 1); }

// Indexes what is new, and publishes it if that is at least `publish_from` tokens.
void PromptLookupDrafter::extend(const std::vector<TokenId>& history, int publish_from) {
  const auto length = static_cast<std::int32_t>(history.size());
  ngram_extend(SerialTeam{}, index(), history.data(), length);
  if (pool_ == nullptr || length - published_ < publish_from) return;
  pool_->publish(cache_salt_, history.data(), published_, length);
  published_ = length;
}

// Fills draft_, draft_len_ and match_len_ from the request's own history or the public pool,
// whichever agrees with a longer suffix; its own on ties.
void PromptLookupDrafter::look_up(const std::vector<TokenId>& history) {
  const auto length = static_cast<std::int32_t>(history.size());
  NgramMatch match;
  ngram_lookup(SerialTeam{}, index(), history.data(), length,
               NgramLookup{params_.max_draft_len, params_.is_keep_all, params_.is_use_oldest},
               &match);
  draft_len_ = match.length;
  match_len_ = match.match_len;
  if (match.length > 0) {
    std::copy_n(history.begin() + match.source, match.length, draft_.begin());
    int agree = match.match_len;
    while (agree < kMatchHorizon && agree < match.source &&
           history[match.source - agree - 1] == history[length - agree - 1]) {
      ++agree;
    }
    match_len_ = agree;
  }
  if (pool_ == nullptr || match.match_len == params_.max_matching_ngram_size) return;
  std::int32_t pooled_match = 0;
  const std::int32_t pooled_len =
      pool_->lookup(cache_salt_, history.data(), length, params_.max_draft_len,
                    pooled_draft_.data(), &pooled_match);
  if (pooled_len > 0 && pooled_match > match.match_len) {
    std::copy_n(pooled_draft_.begin(), pooled_len, draft_.begin());
    draft_len_ = pooled_len;
    match_len_ = pooled_match;
  }
}

int PromptLookupDrafter::offer(const std::vector<TokenId>& history, const DraftLimits& limits,
                               const BudgetContext&) {
  look_up(history);
  double alive = 1.0;
  for (int i = 0; i < draft_len_; ++i) {
    alive *= rates_.rate(shared_rates_, match_len_, i + 1);
    survival_[i] = alive;
  }
  return std::min({draft_len_, limits.max_depth, limits.max_drafts});
}

void PromptLookupDrafter::build(const std::vector<TokenId>&, int num_drafts, DraftTree* tree) {
  for (int i = 0; i < num_drafts; ++i) tree->add(draft_[i], i);
}

void PromptLookupDrafter::update(const std::vector<TokenId>& history, int num_new, const DraftTree&,
                                 const TokenId*) {
  // The decided tokens say how far the draft was right, verified or not.
  const TokenId* decided = history.data() + history.size() - static_cast<std::size_t>(num_new);
  for (int i = 0; i < std::min(draft_len_, num_new); ++i) {
    const bool right = draft_[i] == decided[i];
    rates_.observe(match_len_, i + 1, right, kOwnDecay);
    shared_rates_->observe(match_len_, i + 1, right, kSharedDecay);
    if (!right) break;
  }
  draft_len_ = 0;
  extend(history, kPublishTokens);
}

std::size_t PromptLookupDrafter::memory_bytes() const {
  return block_.size() * sizeof(block_[0]) + draft_.size() * sizeof(draft_[0]) +
         survival_.size() * sizeof(survival_[0]) + sizeof(*this);
}

}  // namespace specdec
