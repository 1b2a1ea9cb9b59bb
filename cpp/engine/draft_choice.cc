// What the passes of a draft model propose: from a pass's ids or scores to drafts in the slots.
#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "engine/draft_passes.h"

namespace specdec {

// The rows of a pass have been read.
void DraftPasses::settle(const Planned& planned) {
  Drafting& d = drafting_[planned.index];
  Reading& reading = slots_[d.slot];
  if (d.made == 0) {
    reading.read += planned.rows;
    d.ends = reading.read < d.len;  // the rest is the next step's
  } else if (config_.takes_features) {
    return;
  } else if (!is_tree()) {
    reading.drafts.push_back(d.growth.tokens[d.made - 1]);
  } else {
    // A path whose rows lie where its tokens will, if it comes true.
    int above = -1;
    for (int i = 0; i < d.growth.count; ++i) {
      const bool follows = d.growth.parents[i] == above;
      if (!follows || d.growth.rows[i] != static_cast<int>(reading.drafts.size()) + 1) continue;
      reading.drafts.push_back(d.growth.tokens[i]);
      above = i;
    }
  }
}

void DraftPasses::take_ids(const TokenId* ids) {
  SPECDEC_REQUIRE(!gives_scores_, "take: this round needs scores");
  for (const Planned& planned : planned_) {
    settle(planned);
    Drafting& d = drafting_[planned.index];
    if (!d.ends) add_draft(d, ids[planned.first_logit], kUnknownSurvival);
  }
  planned_.clear();
}

void DraftPasses::take_scores(const float* scores, std::int64_t row_stride) {
  for (const Planned& planned : planned_) {
    settle(planned);
    Drafting& d = drafting_[planned.index];
    if (d.ends) continue;
    const float* mine = scores + planned.first_logit * row_stride;
    if (is_tree()) {
      grow(d, mine, row_stride);
    } else {
      choose(d, mine);
    }
  }
  planned_.clear();
}

// `confidence`: of the draft behind what is in front of it; negative: not known.
void DraftPasses::add_draft(Drafting& d, std::int32_t column, float confidence) {
  if (column < 0 || column >= config_.num_scores) {
    d.ends = true;
    return;
  }
  DraftGrowth& g = d.growth;
  const float above = d.made == 0 ? 1.0f : g.worth[d.made - 1];
  g.tokens[d.made] = config_.output_ids.empty() ? column : config_.output_ids[column];
  g.parents[d.made] = d.made - 1;
  // What a drawn draft turned out to be must not decide whether it is dropped: no estimate.
  const bool known = confidence >= 0.0f && above >= 0.0f && d.mode != DraftPick::kOwn;
  g.worth[d.made] = known ? above * confidence : kUnknownSurvival;
  g.count = ++d.made;
  d.ends = d.made == d.limit || (confidence >= 0.0f && confidence < config_.min_confidence);
}

void DraftPasses::choose(Drafting& d, const float* scores) {
  const int n = config_.num_scores;
  SamplingLaw law{1.0f};
  if (d.mode != DraftPick::kBest) law = round_.laws.law(d.request);
  if (sampler_.weigh(scores, n, law) < 0) {
    d.ends = true;
    return;
  }
  const WeightedLaw weighed = sampler_.law();
  const double total = weight_of(weighed.total);
  // The largest weight is 1. It does not depend on what is drawn.
  const auto largest = static_cast<float>(1.0 / total);
  if (d.mode == DraftPick::kBest) {
    const auto best = std::max_element(scores, scores + n) - scores;
    return add_draft(d, static_cast<std::int32_t>(best), largest);
  }
  const auto position = static_cast<std::uint64_t>(d.len + d.made);
  const std::uint64_t seed = round_.laws.seed[d.request];
  if (d.mode == DraftPick::kCoupled) {
    const TokenId drawn = draw_from_law(weighed, token_uniform(seed, position));
    const double share = static_cast<double>(weighed.weights[drawn]) / total;
    return add_draft(d, drawn, static_cast<float>(share));
  }
  const std::ptrdiff_t at = std::ptrdiff_t{d.request} * config_.max_drafts + d.made;
  write_law(weighed, probs_ + at * n);
  const TokenId drawn =
      draw_from_law(weighed, philox_uniform(seed, position, RandomPurpose::kDraft, 0));
  probs_columns_[at] = drawn;
  add_draft(d, drawn, largest);
}

void DraftPasses::grow(Drafting& d, const float* scores, std::int64_t row_stride) {
  const int n = config_.num_scores, k = std::min(config_.top_k, n);
  const int rows = d.made == 0 ? 1 : d.growth.num_open;
  shares_.assign(static_cast<std::size_t>(rows) * k, 0.0f);
  columns_.assign(static_cast<std::size_t>(rows) * k, -1);
  order_.resize(static_cast<std::size_t>(n));
  for (int row = 0; row < rows; ++row, scores += row_stride) {
    if (sampler_.weigh(scores, n, SamplingLaw{1.0f}) < 0) continue;
    const WeightedLaw law = sampler_.law();
    const double total = weight_of(law.total);
    std::iota(order_.begin(), order_.end(), 0);
    std::partial_sort(order_.begin(), order_.begin() + k, order_.end(),
                      [scores](std::int32_t a, std::int32_t b) {
                        return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
                      });
    for (int i = 0; i < k; ++i) {
      const std::int32_t column = order_[i];
      columns_[row * k + i] = column;
      shares_[row * k + i] = static_cast<float>(static_cast<double>(law.weights[column]) / total);
    }
  }
  const DraftChildren<std::int32_t> children{
      shares_.data(), columns_.data(),
      config_.output_ids.empty() ? nullptr : config_.output_ids.data(), k, n};
  ++d.made;
  const int open = d.made < d.depth ? k : 0;
  grow_drafts(SerialTeam{}, children, d.limit, open, &d.growth, &scratch_);
  d.ends = d.growth.num_open == 0;
}

// Ends the round: the drafts go into the slots.
void DraftPasses::propose() {
  for (const Drafting& d : drafting_) {
    if (d.growth.count == 0) continue;
    ProposedDraft* to = round_.slots.at(d.slot)->proposed_draft();
    if (is_tree()) {
      propose_growth(SerialTeam{}, &d.growth, d.len, to, &scratch_);
    } else {
      propose_draft(SerialTeam{}, to, d.len, d.growth.tokens, nullptr, d.growth.worth,
                    d.growth.count, config_.vocab_size);
    }
  }
}

}  // namespace specdec
