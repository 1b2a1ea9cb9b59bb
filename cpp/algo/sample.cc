#include "algo/sample.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "algo/softmax_weight.h"

namespace specdec {
namespace {

constexpr int kBlock = kMassBlock;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The largest score; NaN if one of them is NaN.
float largest(const float* scores, int n) {
  float best = -kInfinity;
  int nans = 0;
  for (int i = 0; i < n; ++i) {
    best = scores[i] > best ? scores[i] : best;
    nans |= scores[i] != scores[i];
  }
  return nans != 0 ? std::numeric_limits<float>::quiet_NaN() : best;
}

}  // namespace

double law_spread(const WeightedLaw& law, const float* scores, float temperature) {
  const float best = largest(scores, law.vocab_size), inverse = 1.0f / temperature;
  Mass terms = 0;
  for (std::int32_t v = 0; v < law.vocab_size; ++v) {
    if (law.weights[v] <= 0.0f) continue;
    terms += entropy_mass(law.weights[v], law_exponent(scores[v], best, inverse));
  }
  return spread_of(terms, law.total);
}

TokenId TokenSampler::weigh_all(const float* scores, int vocab_size, float temperature) {
  const float best = largest(scores, vocab_size);
  if (std::isnan(best) || best == kInfinity) return kBadRow;
  if (best == -kInfinity) return kNothingAllowed;
  if (fault(Fault::kTemperatureOff)) temperature *= 1.1f;
  const float inverse = 1.0f / temperature;
  weights_.resize(vocab_size);
  for (int i = 0; i < vocab_size; ++i) {
    weights_[i] = to_grid(softmax_weight(law_exponent(scores[i], best, inverse)));
  }
  mass_.resize(mass_blocks(vocab_size));
  law_ = {weights_.data(), mass_.data(), vocab_size, 0};
  sum_law(SerialTeam{}, &law_);
  return 0;
}

void TokenSampler::cut(const float* scores, int vocab_size, const SamplingLaw& law) {
  gather(scores, vocab_size, law);
  if (law.top_k > 0) cut_top_k(law.top_k);
  if (law.top_p < 1.0f) {
    // After other cuts top_p is a share of what they left; else of everything, gathered or not.
    Mass total = law_.total;
    if (law.top_k > 0 || law.min_p > 0.0f) total = kept_mass();
    cut_top_p(wanted_mass(law.top_p, total));
  }
  std::sort(kept_.begin(), kept_.end(),
            [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
}

TokenId TokenSampler::draw(const float* scores, int vocab_size, const SamplingLaw& law, double u) {
  const TokenId status = weigh_all(scores, vocab_size, law.temperature);
  if (status < 0) return status;
  if (!law.cuts()) return draw_from_law(law_, u);
  cut(scores, vocab_size, law);
  return draw_from_kept(u);
}

TokenId TokenSampler::weigh(const float* scores, int vocab_size, const SamplingLaw& law) {
  const TokenId status = weigh_all(scores, vocab_size, law.temperature);
  if (status < 0 || !law.cuts()) return status;
  cut(scores, vocab_size, law);
  std::fill(weights_.begin(), weights_.end(), 0.0f);
  for (const Candidate& c : kept_) weights_[c.id] = c.weight;
  sum_law(SerialTeam{}, &law_);
  return 0;
}

// A score below which no token can survive the cuts, so that the sorting that follows sees few.
float TokenSampler::gather_threshold(const float* scores, int vocab_size, const SamplingLaw& law) {
  const auto blocks = static_cast<int>(mass_.size());
  block_best_.resize(blocks);
  for (int b = 0; b < blocks; ++b) {
    const int first = b * kBlock, end = std::min(first + kBlock, vocab_size);
    float best = -kInfinity;  // of what min_p and the grid keep: only that counts for top_k
    for (int i = first; i < end; ++i) {
      const bool kept = weights_[i] > 0.0f && weights_[i] >= law.min_p;
      best = kept && scores[i] > best ? scores[i] : best;
    }
    block_best_[b] = best;
  }
  float threshold = -kInfinity;
  if (law.top_k > 0 && law.top_k <= blocks) {
    // k blocks hold a score of at least their k-th best: so do k tokens.
    std::nth_element(block_best_.begin(), block_best_.begin() + (law.top_k - 1), block_best_.end(),
                     std::greater<>());
    threshold = block_best_[law.top_k - 1];
  } else if (law.top_k == 0 && law.top_p < 1.0f && law.min_p <= 0.0f) {
    // Mass by weight: bucket i holds weights in [2^-i, 2^(1-i)), the whole of it or nothing.
    constexpr int kBuckets = 128;
    double mass[kBuckets] = {};
    double total = 0.0;
    for (int i = 0; i < vocab_size; ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(weights_[i]);
      mass[std::min<std::uint32_t>(127 - std::min<std::uint32_t>(bits >> 23, 127), kBuckets - 1)] +=
          static_cast<double>(weights_[i]);
    }
    for (const double part : mass) total += part;
    // A little more than top_p: these sums are rounded, those of the cut itself are not.
    const double wanted = std::min(1.0, law.top_p + 1e-9) * total;
    double reached = 0.0;
    int bucket = 0;
    while (bucket < kBuckets - 1 && (reached += mass[bucket]) < wanted) ++bucket;
    // Scores rise with weights; a hair below the bucket's lowest weight, for their rounding.
    const float best = *std::max_element(block_best_.begin(), block_best_.end());
    threshold = best - law.temperature * (static_cast<float>(bucket) * 0.69314718f + 1e-3f);
  }
  return threshold;
}

void TokenSampler::gather(const float* scores, int vocab_size, const SamplingLaw& law) {
  const float threshold = gather_threshold(scores, vocab_size, law);
  kept_.clear();
  for (int i = 0; i < vocab_size; ++i) {
    if (scores[i] >= threshold && weights_[i] > 0.0f && weights_[i] >= law.min_p) {
      kept_.push_back({scores[i], weights_[i], i});
    }
  }
}

void TokenSampler::cut_top_k(std::int32_t k) {
  if (k >= static_cast<std::int32_t>(kept_.size())) return;
  std::vector<Candidate>& kept = kept_;
  std::nth_element(kept.begin(), kept.begin() + (k - 1), kept.end(),
                   [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
  const float lowest = kept[k - 1].score;
  std::erase_if(kept, [lowest](const Candidate& c) { return c.score < lowest; });
}

Mass TokenSampler::kept_mass() const {
  Mass total = 0;
  for (const Candidate& c : kept_) total += mass_of(c.weight);
  return total;
}

void TokenSampler::cut_top_p(Mass wanted) {
  std::sort(kept_.begin(), kept_.end(), [](const Candidate& a, const Candidate& b) {
    return a.score != b.score ? a.score > b.score : a.id < b.id;
  });
  Mass reached = 0;
  std::size_t count = 0;
  while (count < kept_.size() && reached < wanted) reached += mass_of(kept_[count++].weight);
  kept_.resize(count);
}

TokenId TokenSampler::draw_from_kept(double u) const {
  Mass rest = drawn_unit(u, kept_mass());
  std::size_t i = 0;
  for (Mass own; rest >= (own = mass_of(kept_[i].weight)); ++i) rest -= own;
  return kept_[i].id;
}

}  // namespace specdec
