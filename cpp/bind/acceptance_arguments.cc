#include "bind/acceptance_arguments.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace py = pybind11;

namespace specdec {

AcceptanceParams to_acceptance(const std::string& rule, float posterior_threshold,
                               float posterior_alpha, float acceptance_threshold) {
  const auto* found = std::find_if(std::begin(kAcceptanceRules), std::end(kAcceptanceRules),
                                   [&](const AcceptanceRuleName& r) { return r.name == rule; });
  if (found == std::end(kAcceptanceRules)) {
    std::string known;
    for (const AcceptanceRuleName& r : kAcceptanceRules) {
      known += std::string(known.empty() ? "'" : ", '") + r.name + "'";
    }
    SPECDEC_REQUIRE(false, "acceptance = '", rule, "': give one of ", known);
  }
  AcceptanceParams params;
  params.rule = static_cast<AcceptanceRule>(found - std::begin(kAcceptanceRules));
  params.posterior_threshold = posterior_threshold;
  params.posterior_alpha = posterior_alpha;
  params.threshold = acceptance_threshold;
  return params;
}

BorrowedProbs::BorrowedProbs(const py::object& probs, const py::object& vocab_ids,
                             bool replacement) {
  if (probs.is_none()) {
    SPECDEC_REQUIRE(vocab_ids.is_none(), "vocab_ids without probs: they name the columns of probs");
    return;
  }
  probs_ = BorrowedTensor(probs, "probs");
  check_cpu(probs_.view(), "probs");
  check_dtype(probs_.view(), "probs", {DType::kF32});
  check_shape(probs_.view(), "probs", "[drafts, columns]", {kAny, kAny});
  check_last_axis_contiguous(probs_.view(), "probs");
  proposed_.data = static_cast<const float*>(probs_->data);
  proposed_.rows = static_cast<std::int32_t>(probs_->shape[0]);
  proposed_.columns = static_cast<std::int32_t>(probs_->shape[1]);
  proposed_.row_stride = probs_->strides[0];
  proposed_.replacement = replacement;
  if (vocab_ids.is_none()) return;
  const BorrowedTensor ids(vocab_ids, "vocab_ids");
  check_cpu(ids.view(), "vocab_ids");
  check_dtype(ids.view(), "vocab_ids", {DType::kI32, DType::kI64});
  check_shape(ids.view(), "vocab_ids", "[columns of probs]", {probs_->shape[1]});
  check_contiguous(ids.view(), "vocab_ids");
  vocab_ids_.resize(proposed_.columns);
  for (std::int32_t i = 0; i < proposed_.columns; ++i) {
    const std::int64_t id = ids->dtype == DType::kI32
                                ? static_cast<const std::int32_t*>(ids->data)[i]
                                : static_cast<const std::int64_t*>(ids->data)[i];
    // What does not fit 32 bits is no token id either: -1 is refused as one.
    vocab_ids_[i] = id == static_cast<TokenId>(id) ? static_cast<TokenId>(id) : -1;
  }
  proposed_.vocab_ids = vocab_ids_.data();
}

}  // namespace specdec
