// The rates of synthetic acceptance, as executors are configured with them.
#pragma once

#include <cstddef>
#include <vector>

#include "algo/synthetic_acceptance.h"
#include "base/check.h"
#include "base/types.h"

namespace specdec {

inline SyntheticRates view_of(const std::vector<double>& rates) {
  return {rates.data(), static_cast<std::int32_t>(rates.size())};
}

// Throws std::invalid_argument naming the first rate that is none.
inline void check_synthetic_rates(const std::vector<double>& rates) {
  SPECDEC_REQUIRE(rates.size() <= static_cast<std::size_t>(kMaxDraftLen),
                  "synthetic_acceptance_rates has ", rates.size(), " entries, at most ",
                  kMaxDraftLen);
  const SyntheticRates view = view_of(rates);
  for (std::int32_t i = 0; i < view.count; ++i) {
    SPECDEC_REQUIRE(view.valid(i), "synthetic_acceptance_rates[", i, "] = ", view.rates[i],
                    ": give numbers in [0, 1] that do not rise");
  }
}

}  // namespace specdec
