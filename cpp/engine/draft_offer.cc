#include "engine/draft_offer.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>

namespace specdec {

void DraftOffer::Chance::add(double chance, DraftSource source) {
  switch (source) {
    case DraftSource::kPrediction:
    case DraftSource::kSuffix:
    case DraftSource::kLookup:
      ++texts;
      text += (chance - text) / texts;
      break;
    default:
      other = std::max(other, chance);
  }
}

int DraftOffer::add(int parent, TokenId token, DraftSource source, const Estimate& estimate,
                    const SourceRates* own, const SourceRates* shared) {
  const auto s = static_cast<std::size_t>(source);
  const double rate = own == nullptr
                          ? start_rate(source, estimate.match, estimate.depth)
                          : (*own)[s].rate((*shared)[s], source, estimate.match, estimate.depth);
  const double chance = std::min(1.0, static_cast<double>(estimate.share) * rate);
  int node = find(parent, token);
  if (node < 0) {
    if (tree_.size == kMaxStepTokens) return -1;
    node = tree_.add(token, parent);
    chance_[node] = {};
    estimates_[node] = {};
  }
  estimates_[node][s] = estimate;
  chance_[node].add(chance, source);
  for (int i = node; i < tree_.size; ++i) {
    survival_[i] = survival_[tree_.parents[i]] * chance_[i].value();
  }
  return node;
}

// The child of `parent` with this token; -1: there is none.
int DraftOffer::find(int parent, TokenId token) const {
  for (int i = parent + 1; i < tree_.size; ++i) {
    if (tree_.parents[i] == parent && tree_.tokens[i] == token) return i;
  }
  return -1;
}

void DraftOffer::sort() {
  // Parents are no less likely and come first, so an order that keeps equal ones keeps them first.
  const double* chances = survival_.data();
  if (std::is_sorted(chances + 1, chances + tree_.size, std::greater<>())) return;
  std::array<int, kMaxStepTokens> order{};
  std::iota(order.begin(), order.begin() + tree_.size, 0);
  std::stable_sort(order.begin() + 1, order.begin() + tree_.size,
                   [&](int a, int b) { return chances[a] > chances[b]; });
  const DraftOffer before = *this;
  std::array<int, kMaxStepTokens> place{};
  for (int i = 1; i < tree_.size; ++i) {
    const int from = order[i];
    place[from] = i;
    tree_.tokens[i] = before.tree_.tokens[from];
    tree_.parents[i] = place[before.tree_.parents[from]];
    survival_[i] = before.survival_[from];
    chance_[i] = before.chance_[from];
    estimates_[i] = before.estimates_[from];
  }
}

void DraftOffer::drop(const std::int32_t* placed, int count) {
  const DraftOffer before = *this;
  std::array<std::int32_t, kMaxStepTokens> place{};
  tree_.reset(before.tree_.tokens[kGolden]);
  for (int i = 1; i < before.tree_.size; ++i) {
    const std::int32_t parent = place[before.tree_.parents[i]];
    const bool stays = parent >= 0 && (i >= count || placed[i] >= 0);
    place[i] = stays ? tree_.add(before.tree_.tokens[i], parent) : -1;
    if (!stays) continue;
    survival_[place[i]] = before.survival_[i];
    chance_[place[i]] = before.chance_[i];
    estimates_[place[i]] = before.estimates_[i];
  }
}

void DraftOffer::take(int count, DraftTree* tree) const {
  for (int i = 1; i <= count; ++i) tree->add(tree_.tokens[i], tree_.parents[i]);
}

void DraftOffer::observe(const TokenId* tokens, int count, SourceRates* own,
                         SourceRates* shared) const {
  int node = kGolden;
  for (int at = 0; at < count && node >= 0; ++at) {
    const int next = find(node, tokens[at]);
    for (std::size_t s = 0; s < kNumDraftSources; ++s) {
      Estimate all;
      for (int i = node + 1; i < tree_.size; ++i) {
        const Estimate& one = estimates_[i][s];
        if (tree_.parents[i] != node || one.share == 0.0f) continue;
        all = {one.match, one.depth, all.share + one.share};
      }
      if (all.share == 0.0f) continue;
      const bool right = next >= 0 && estimates_[next][s].share > 0.0f;
      (*own)[s].observe(all.match, all.depth, right, own_decay(all.match), all.share);
      (*shared)[s].observe(all.match, all.depth, right, kSharedDecay, all.share);
    }
    node = next;
  }
}

double DraftOffer::expected(int count) const {
  return std::accumulate(survival_.begin() + 1, survival_.begin() + 1 + count, 0.0);
}

double DraftOffer::first_chance(int count) const {
  double sum = 0.0;
  for (int i = 1; i <= count; ++i) sum += tree_.parents[i] == kGolden ? survival_[i] : 0.0;
  return std::min(sum, 1.0);
}

SourceBits DraftOffer::sources(int draft) const {
  SourceBits bits = 0;
  for (std::size_t s = 0; s < kNumDraftSources; ++s) {
    if (estimates_[draft][s].share > 0.0f) bits |= bit_of(static_cast<DraftSource>(s));
  }
  return bits;
}

int DraftOffer::proposed(DraftSource source) const {
  int proposed = 0;
  for (int i = 1; i < tree_.size; ++i) {
    proposed += estimates_[i][static_cast<std::size_t>(source)].share > 0.0f;
  }
  return proposed;
}

}  // namespace specdec
