// Python's words for acceptance rules and a proposal's probabilities.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "algo/acceptance.h"
#include "bind/dlpack_convert.h"
#include "engine/host_accept.h"

namespace specdec {

// ValueError for an unknown rule.
AcceptanceParams to_acceptance(const std::string& rule, float posterior_threshold,
                               float posterior_alpha, float acceptance_threshold);

// Probabilities in a tensor that is kept alive; `probs` and `vocab_ids` may be None.
class BorrowedProbs {
 public:
  BorrowedProbs(const pybind11::object& probs, const pybind11::object& vocab_ids, bool replacement);
  const ProposedProbs& proposed() const { return proposed_; }

 private:
  BorrowedTensor probs_;
  std::vector<TokenId> vocab_ids_;
  ProposedProbs proposed_;
};

}  // namespace specdec
