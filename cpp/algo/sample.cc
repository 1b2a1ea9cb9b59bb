#include "algo/sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "algo/law_loops.h"
#include "algo/softmax_weight.h"

namespace specdec {
namespace {

constexpr int kBlock = kMassBlock;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// The least weight of a token that can be drawn: the unit of masses.
constexpr auto kLeastWeight = static_cast<float>(kMassUnit);

}  // namespace

double law_spread(const WeightedLaw& law, const float* scores, float temperature) {
  const float best = law_loops().largest(scores, law.vocab_size), inverse = 1.0f / temperature;
  Mass terms = 0;
  for (std::int32_t v = 0; v < law.vocab_size; ++v) {
    if (law.weights[v] <= 0.0f) continue;
    terms += entropy_mass(law.weights[v], law_exponent(scores[v], best, inverse));
  }
  return spread_of(terms, law.total);
}

TokenId TokenSampler::weigh_all(const float* scores, int vocab_size, const SamplingLaw& law) {
  const LawLoops& loops = law_loops();
  const float best = loops.largest(scores, vocab_size);
  if (std::isnan(best) || best == kInfinity) return kBadRow;
  if (best == -kInfinity) return kNothingAllowed;
  const float temperature =
      fault(Fault::kTemperatureOff) ? law.temperature * 1.1f : law.temperature;
  weights_.resize(vocab_size);
  mass_.resize(mass_blocks(vocab_size));
  block_best_.resize(mass_.size());
  kept_ =
      loops.weigh(scores, vocab_size, best, 1.0f / temperature, std::max(law.min_p, kLeastWeight),
                  weights_.data(), mass_.data(), block_best_.data());
  law_ = {weights_.data(), mass_.data(), vocab_size, 0};
  for (const Mass mass : mass_) law_.total += mass;
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
    for (std::size_t b = 0; b < s_.block_best_.size(); ++b) {
      if (s_.block_best_[b] < threshold) continue;
      const int first = static_cast<int>(b) * kBlock, end = std::min(first + kBlock, vocab_size_);
      for (int i = first; i < end; ++i) {
        if (scores_[i] >= threshold && has_weight(i)) {
          s_.list_.push_back({order_key(scores_[i]), s_.weights_[i], i});
        }
      }
    }
    return static_cast<Mass>(s_.kept_);
  }

 private:
  bool has_weight(int i) const { return s_.weights_[i] > 0.0f && s_.weights_[i] >= min_p_; }

  // A score that few reach, but enough for the cuts to lie among them. A list that is too short
  // costs time alone.
  float list_threshold(const SamplingLaw& law) {
    if (law.top_k > 0 && law.top_k <= static_cast<int>(s_.block_best_.size())) {
      // k blocks hold a score of at least their k-th best: so do k tokens.
      s_.order_ = s_.block_best_;
      const auto kth = s_.order_.begin() + (law.top_k - 1);
      std::nth_element(s_.order_.begin(), kth, s_.order_.end(), std::greater<>());
      return *kth;
    }
    const float best = *std::max_element(s_.block_best_.begin(), s_.block_best_.end());
    // Scores rise with weights; a hair below the least weight's, for their rounding.
    const auto score_from = [&](float log_weight) {
      return best + law.temperature * (log_weight - 1e-3f);
    };
    if (law.min_p > 0.0f) return score_from(std::log(law.min_p));
    if (law.top_k > 0 || law.top_p >= 1.0f) return -kInfinity;
    double sums[kMassSteps];
    law_loops().sum_by_size(s_.weights_.data(), vocab_size_, sums);
    // A little more than top_p: these sums are rounded, those of the cut itself are not.
    const double wanted = (static_cast<double>(law.top_p) + 1e-4) * weight_of(s_.law_.total);
    int step = 0;
    while (step < kMassSteps && sums[step] < wanted) ++step;
    if (step == kMassSteps) return -kInfinity;
    return score_from(static_cast<float>(step + 1) * -1.38629436f);
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
  const TokenId status = weigh_all(scores, vocab_size, law);
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
  const TokenId status = weigh_all(scores, vocab_size, law);
  if (status < 0 || !law.cuts()) return status;
  CutRow row(*this, scores, law.min_p);
  cut_law(row, law);
  drop(scores, law, row.cut());
  return 0;
}

}  // namespace specdec
