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
  if (sampler_.weigh(scores, n, law) < 0) return {};
  const WeightedLaw drawn = sampler_.law();
  const double total = weight_of(drawn.total);
  for (int i = 0; i < n; ++i) {
    q[i] = static_cast<float>(static_cast<double>(drawn.weights[i]) / total);
  }
  return {draw_from_law(drawn, u), *std::max_element(q, q + n)};
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
