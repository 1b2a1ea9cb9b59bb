#include "bind/decided_argument.h"

#include "base/check.h"

namespace py = pybind11;

namespace specdec {

BorrowedTensor rates_argument(OpCall& call, py::handle rates, SyntheticRates* to) {
  const BorrowedTensor sized(rates, "synthetic_rates");
  check_shape(sized.view(), "synthetic_rates", "[N]", {kAny});
  const std::int64_t count = sized->shape[0];
  SPECDEC_REQUIRE(count >= 1 && count <= kMaxDraftLen, "synthetic_rates has ", count,
                  " entries: give 1..", kMaxDraftLen);
  BorrowedTensor held = vector_argument(call, rates, "synthetic_rates", DType::kI64, "[N]", count);
  *to = {static_cast<const double*>(held->data), static_cast<std::int32_t>(count)};
  for (std::int32_t i = 0; call.reads_values() && i < to->count; ++i) {
    SPECDEC_REQUIRE(to->valid(i), "synthetic_rates[", i, "] = ", to->rates[i],
                    ": numbers in [0, 1] that do not rise are needed");
  }
  return held;
}

}  // namespace specdec
