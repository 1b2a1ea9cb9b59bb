#include "algo/sample.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

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

class TokenSampler::CutRow {
 public:
  CutRow(TokenSampler& sampler, const float* scores, float min_p)
      : s_(sampler), scores_(scores), vocab_size_(sampler.law_.vocab_size), min_p_(min_p) {
    if (min_p <= 0.0f) cut_.total = sampler.law_.total;
  }

  LawCut& cut() { return cut_; }
  Mass listed() const { return s_.list_.size(); }
  template <int kCount>
  void sum(Mass (&)[kCount]) const {}

  template <class Visit>
  void for_tokens(Visit visit) const {
    if (cut_.on_list) {
      for (const Candidate& c : s_.list_) {
        if (cut_.keeps(c.key, c.id)) visit(c);
      }
      return;
    }
    for (int i = 0; i < vocab_size_; ++i) {
      const std::uint32_t key = order_key(scores_[i]);
      if (has_weight(i) && cut_.keeps(key, i)) visit(Candidate{key, s_.weights_[i], i});
    }
  }

  Mass list(const SamplingLaw& law) {
    const float threshold = list_threshold(law);
    s_.list_.clear();
    Mass kept = 0;
    for (int i = 0; i < vocab_size_; ++i) {
      if (!has_weight(i)) continue;
      ++kept;
      if (scores_[i] >= threshold) {
        s_.list_.push_back({order_key(scores_[i]), s_.weights_[i], i});
      }
    }
    return kept;
  }

 private:
  bool has_weight(int i) const { return s_.weights_[i] > 0.0f && s_.weights_[i] >= min_p_; }

  // A score that few reach, but enough for the cuts to lie among them. A list that is too short
  // costs time alone.
  float list_threshold(const SamplingLaw& law) {
    const auto blocks = static_cast<int>(s_.mass_.size());
    s_.block_best_.resize(blocks);
    for (int b = 0; b < blocks; ++b) {
      const int first = b * kBlock, end = std::min(first + kBlock, vocab_size_);
      float best = -kInfinity;  // of what min_p and the grid keep: only that counts for top_k
      for (int i = first; i < end; ++i) {
        best = has_weight(i) && scores_[i] > best ? scores_[i] : best;
      }
      s_.block_best_[b] = best;
    }
    float threshold = -kInfinity;
    if (law.top_k > 0 && law.top_k <= blocks) {
      // k blocks hold a score of at least their k-th best: so do k tokens.
      std::nth_element(s_.block_best_.begin(), s_.block_best_.begin() + (law.top_k - 1),
                       s_.block_best_.end(), std::greater<>());
      threshold = s_.block_best_[law.top_k - 1];
    } else if (law.top_k == 0 && law.top_p < 1.0f && law.min_p <= 0.0f) {
      // Mass by weight: bucket i holds weights in [2^-i, 2^(1-i)), the whole of it or nothing.
      constexpr int kBuckets = 128;
      double mass[kBuckets] = {};
      double total = 0.0;
      for (int i = 0; i < vocab_size_; ++i) {
        const auto bits = std::bit_cast<std::uint32_t>(s_.weights_[i]);
        mass[std::min<std::uint32_t>(127 - std::min<std::uint32_t>(bits >> 23, 127),
                                     kBuckets - 1)] += static_cast<double>(s_.weights_[i]);
      }
      for (const double part : mass) total += part;
      // A little more than top_p: these sums are rounded, those of the cut itself are not.
      const double wanted = std::min(1.0, law.top_p + 1e-9) * total;
      double reached = 0.0;
      int bucket = 0;
      while (bucket < kBuckets - 1 && (reached += mass[bucket]) < wanted) ++bucket;
      // Scores rise with weights; a hair below the bucket's lowest weight, for their rounding.
      const float best = *std::max_element(s_.block_best_.begin(), s_.block_best_.end());
      threshold = best - law.temperature * (static_cast<float>(bucket) * 0.69314718f + 1e-3f);
    }
    return threshold;
  }

  TokenSampler& s_;
  const float* scores_;
  const int vocab_size_;
  const float min_p_;
  LawCut cut_;
};

void TokenSampler::drop(const float* scores, const SamplingLaw& law, const LawCut& cut) {
  for (int i = 0; i < law_.vocab_size; ++i) {
    const bool kept = weights_[i] >= law.min_p && cut.keeps(order_key(scores[i]), i);
    weights_[i] = kept ? weights_[i] : 0.0f;
  }
  sum_law(SerialTeam{}, &law_);
}

TokenId TokenSampler::draw(const float* scores, int vocab_size, const SamplingLaw& law, double u) {
  const TokenId status = weigh_all(scores, vocab_size, law.temperature);
  if (status < 0) return status;
  if (!law.cuts()) return draw_from_law(law_, u);
  CutRow row(*this, scores, law.min_p);
  cut_law(row, law);
  const LawCut& cut = row.cut();
  if (!cut.on_list) {
    drop(scores, law, cut);
    return draw_from_law(law_, u);
  }
  Mass rest = drawn_unit(u, cut.total);
  for (const Candidate& c : list_) {
    if (!cut.keeps(c.key, c.id)) continue;
    const Mass own = mass_of(c.weight);
    if (rest < own) return c.id;
    rest -= own;
  }
  return kBadRow;  // not reached: the units are those of the kept tokens
}

TokenId TokenSampler::weigh(const float* scores, int vocab_size, const SamplingLaw& law) {
  const TokenId status = weigh_all(scores, vocab_size, law.temperature);
  if (status < 0 || !law.cuts()) return status;
  CutRow row(*this, scores, law.min_p);
  cut_law(row, law);
  drop(scores, law, row.cut());
  return 0;
}

}  // namespace specdec
