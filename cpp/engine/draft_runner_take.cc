// take(): what a pass of the draft model proposes.
#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "engine/draft_runner.h"

namespace specdec {

// The rows of a pass have been read.
void DraftRunner::settle(const Planned& planned) {
  Sequence& s = sequences_[planned.slot];
  if (!is_tree(s)) {
    s.cached += planned.rows;
    pages_.commit(planned.slot, s.cached);
  }
}

TokenId DraftRunner::target_id(std::int32_t column) const {
  if (column < 0 || column >= config_.num_scores) return kNoDraft;
  return config_.output_ids.empty() ? column : config_.output_ids[column];
}

void DraftRunner::take_ids(const TokenId* ids) {
  for (const Planned& planned : planned_) {
    Sequence& s = sequences_[planned.slot];
    SPECDEC_REQUIRE(s.mode == DraftMode::kBest, "take: a slot that draws needs scores");
    settle(planned);
    if (planned.num_logits == 0) continue;
    const TokenId token = target_id(ids[planned.first_logit]);
    statuses_[planned.index] = token;
    if (token >= 0) {
      const auto parent = static_cast<std::int32_t>(s.nodes.size()) - 1;
      s.nodes.push_back({token, parent, parent + 2, 0.0f, 0.0f, -1});
    }
  }
  planned_.clear();
}

DraftChoice DraftRunner::choose(Sequence& s, int slot, const float* scores) {
  const int n = config_.num_scores;
  if (s.mode == DraftMode::kBest) return chooser_.best(scores, n);
  // The position of the token that is being proposed.
  const std::uint64_t position = s.history.size() + s.nodes.size();
  if (s.mode == DraftMode::kCoupled) {
    return chooser_.coupled(scores, n, s.law, token_uniform(s.seed, position));
  }
  const auto index = static_cast<int>(s.nodes.size());
  SPECDEC_REQUIRE(probs_ != nullptr && index < probs_drafts_, "take: draft ", index,
                  " of a slot has no place for its probabilities (bind_probs)");
  float* q = probs_ + (static_cast<std::int64_t>(slot) * probs_drafts_ + index) * n;
  return chooser_.own(scores, n, s.law, philox_uniform(s.seed, position, RandomPurpose::kDraft, 0),
                      q);
}

void DraftRunner::take_scores(const float* scores, std::int64_t row_stride) {
  for (const Planned& planned : planned_) {
    Sequence& s = sequences_[planned.slot];
    settle(planned);
    if (planned.num_logits == 0) continue;
    const DraftChoice choice = choose(s, planned.slot, scores + planned.first_logit * row_stride);
    const TokenId token = target_id(choice.column);
    statuses_[planned.index] = token;
    confidences_[planned.index] = choice.confidence;
    if (token >= 0) {
      const auto parent = static_cast<std::int32_t>(s.nodes.size()) - 1;
      s.nodes.push_back({token, parent, parent + 2, choice.confidence, 0.0f, -1});
    }
  }
  planned_.clear();
}

void DraftRunner::take_level(const float* scores, std::int64_t row_stride, int top_k) {
  SPECDEC_REQUIRE(top_k >= 1, "take: top_k = ", top_k, ": at least 1");
  for (const Planned& planned : planned_) {
    Sequence& s = sequences_[planned.slot];
    settle(planned);
    if (planned.num_logits == 0) continue;
    const std::vector<std::int32_t> parents =
        s.frontier.empty() ? std::vector<std::int32_t>{-1} : s.frontier;
    for (const std::int32_t i : s.frontier) {
      s.expanded.push_back(i);
      s.nodes[i].row = static_cast<std::int32_t>(s.expanded.size());
    }
    s.frontier.clear();
    const auto first = static_cast<std::int32_t>(s.nodes.size());
    for (std::size_t row = 0; row < parents.size(); ++row) {
      const std::int32_t parent = parents[row];
      const float value = parent < 0 ? 1.0f : s.nodes[parent].value;
      const std::int32_t depth = parent < 0 ? 1 : s.nodes[parent].depth + 1;
      chooser_.top(scores + (planned.first_logit + static_cast<std::int64_t>(row)) * row_stride,
                   config_.num_scores, top_k, &choices_);
      for (const DraftChoice& choice : choices_) {
        s.nodes.push_back({target_id(choice.column), parent, depth, choice.confidence,
                           value * choice.confidence, -1});
      }
    }
    s.frontier.resize(s.nodes.size() - first);
    std::iota(s.frontier.begin(), s.frontier.end(), first);
    std::stable_sort(s.frontier.begin(), s.frontier.end(), [&](std::int32_t a, std::int32_t b) {
      return s.nodes[a].value > s.nodes[b].value;
    });
    const std::size_t places = kMaxStepTokens - 1 - s.expanded.size();
    s.frontier.resize(std::min({s.frontier.size(), static_cast<std::size_t>(top_k), places}));
    // Rows of one pass have ascending parents' rows, as paths of compaction need.
    std::sort(s.frontier.begin(), s.frontier.end());
    statuses_[planned.index] =
        s.frontier.empty() ? kNoDraft : static_cast<TokenId>(s.frontier.size());
  }
  planned_.clear();
}

std::vector<std::int32_t> DraftRunner::best_nodes(int slot, int count) const {
  const std::vector<DraftNode>& all = nodes(slot);
  std::vector<std::int32_t> order(all.size());
  std::iota(order.begin(), order.end(), 0);
  // A child is worth no more than its parent and stands behind it: a prefix of this order is a
  // tree.
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t a, std::int32_t b) { return all[a].value > all[b].value; });
  order.resize(std::min<std::size_t>(order.size(), static_cast<std::size_t>(std::max(count, 0))));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace specdec
