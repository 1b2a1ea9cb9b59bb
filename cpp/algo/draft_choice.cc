#include "algo/draft_choice.h"

#include <algorithm>
#include <limits>

#include "algo/softmax_weight.h"

namespace specdec {

int DraftChooser::weigh(const float* scores, int n, float temperature) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float best = -kInfinity;
  int nans = 0;
  for (int i = 0; i < n; ++i) {
    best = scores[i] > best ? scores[i] : best;
    nans |= scores[i] != scores[i];
  }
  if (nans != 0 || best == kInfinity || best == -kInfinity) return -1;
  weights_.resize(n);
  for (int i = 0; i < n; ++i) {
    // 0 / temperature by hand: the smallest temperatures overflow elsewhere, never here.
    const float z = scores[i] == best ? 0.0f : (scores[i] - best) / temperature;
    weights_[i] = softmax_weight(z);
  }
  return static_cast<int>(std::find(scores, scores + n, best) - scores);
}

double DraftChooser::total(int n) const {
  double chains[4] = {};
  int i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int j = 0; j < 4; ++j) chains[j] += static_cast<double>(weights_[i + j]);
  }
  for (; i < n; ++i) chains[0] += static_cast<double>(weights_[i]);
  return (chains[0] + chains[1]) + (chains[2] + chains[3]);
}

DraftChoice DraftChooser::best(const float* scores, int n) {
  const int column = weigh(scores, n, 1.0f);
  if (column < 0) return {};
  return {column, static_cast<float>(1.0 / total(n))};  // the weight of the largest is 1
}

DraftChoice DraftChooser::coupled(const float* scores, int n, const SamplingLaw& law, double u) {
  const TokenId drawn = sampler_.draw(scores, n, law, u);
  if (drawn < 0) return {};
  weigh(scores, n, law.temperature);
  return {drawn, static_cast<float>(static_cast<double>(weights_[drawn]) / total(n))};
}

DraftChoice DraftChooser::own(const float* scores, int n, const SamplingLaw& law, double u,
                              float* q) {
  if (weigh(scores, n, law.temperature) < 0) return {};
  cut(scores, n, law);
  const double sum = total(n);
  float largest = 0.0f;
  // What is drawn from is what is written: the rounded q, whose sum is one only nearly.
  double mass = 0.0;
  for (int i = 0; i < n; ++i) {
    q[i] = static_cast<float>(static_cast<double>(weights_[i]) / sum);
    largest = std::max(largest, q[i]);
    mass += static_cast<double>(q[i]);
  }
  double rest = u * mass;
  int drawn = -1;
  for (int i = 0; i < n; ++i) {
    if (q[i] <= 0.0f) continue;
    drawn = i;
    if (rest < static_cast<double>(q[i])) break;
    rest -= static_cast<double>(q[i]);
  }
  return {drawn, largest};
}

// Sets the weights of what the law cuts off to 0; the order of the cuts is that of algo/sample.h.
void DraftChooser::cut(const float* scores, int n, const SamplingLaw& law) {
  if (law.top_k == 0 && law.top_p >= 1.0f && law.min_p <= 0.0f) return;
  order_.clear();
  for (int i = 0; i < n; ++i) {
    if (weights_[i] < law.min_p) weights_[i] = 0.0f;
    if (weights_[i] > 0.0f) order_.push_back(i);
  }
  const auto likelier = [scores](std::int32_t a, std::int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  };
  if (law.top_k > 0 && law.top_k < static_cast<std::int32_t>(order_.size())) {
    std::nth_element(order_.begin(), order_.begin() + (law.top_k - 1), order_.end(), likelier);
    const float lowest = scores[order_[law.top_k - 1]];
    std::erase_if(order_, [&](std::int32_t i) {
      if (scores[i] >= lowest) return false;
      weights_[i] = 0.0f;
      return true;
    });
  }
  if (law.top_p >= 1.0f) return;
  std::sort(order_.begin(), order_.end(), likelier);
  double kept = 0.0;
  for (const std::int32_t i : order_) kept += static_cast<double>(weights_[i]);
  const double wanted = law.top_p * kept;
  double reached = 0.0;
  for (std::size_t rank = 0; rank < order_.size(); ++rank) {
    float& weight = weights_[order_[rank]];
    if (rank > 0 && reached >= wanted) {
      weight = 0.0f;
    } else {
      reached += static_cast<double>(weight);
    }
  }
}

void DraftChooser::top(const float* scores, int n, int k, std::vector<DraftChoice>* out) {
  out->clear();
  if (weigh(scores, n, 1.0f) < 0) return;
  const double sum = total(n);
  order_.resize(n);
  for (int i = 0; i < n; ++i) order_[i] = i;
  const int count = std::min(k, n);
  std::partial_sort(order_.begin(), order_.begin() + count, order_.end(),
                    [scores](std::int32_t a, std::int32_t b) {
                      return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
                    });
  for (int i = 0; i < count; ++i) {
    const std::int32_t column = order_[i];
    out->push_back({column, static_cast<float>(static_cast<double>(weights_[column]) / sum)});
  }
}

}  // namespace specdec
