#include "engine/run_ahead_budget.h"

namespace specdec {
namespace {

// Rates are kept by match length where that is known; here it is one for all.
constexpr int kAnyMatch = 2;

}  // namespace

const double* AheadChain::survival(const ChainRates& shared, int length) {
  survival_.resize(static_cast<std::size_t>(length));
  double alive = 1.0;
  for (int i = 0; i < length; ++i) {
    alive *= rates_.rate(&shared, kAnyMatch, i + 1);
    survival_[i] = alive;
  }
  return survival_.data();
}

bool AheadChain::probes(const StepCost& cost, int rows, int length, int chosen) {
  ++step_;
  const double price = cost(rows + length) / cost(rows);
  const bool due = static_cast<double>(step_ - last_full_) * kProbeShare > price;
  if (due || chosen == length) last_full_ = step_;
  return due && chosen < length;
}

void AheadChain::observe(ChainRates& shared, int allowed, int accepted) {
  for (int i = 0; i < allowed && i <= accepted; ++i) {
    const bool right = i < accepted;
    rates_.observe(kAnyMatch, i + 1, right, kOwnDecay);
    shared.observe(kAnyMatch, i + 1, right, kSharedDecay);
  }
}

}  // namespace specdec
