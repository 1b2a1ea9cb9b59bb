// The law that weighs copies of pages against computing K/V again (engine/swap_law.h).
#include "engine/swap_law.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"

namespace py = pybind11;

namespace specdec {
namespace {

// As _core.StepCost.columns says it.
using Columns = std::tuple<std::vector<int>, std::vector<double>, double, std::vector<double>,
                           std::pair<double, double>>;

StepCost cost_of(const Columns& columns) {
  const auto& [rows, seconds, context_len, growth, prefill] = columns;
  return StepCost(rows, seconds, context_len, growth, {prefill.first, prefill.second});
}

}  // namespace

void register_swap_law(py::module_& m) {
  m.def(
      "seconds_to_read",
      [](const Columns& cost, double start, double end, int chunk) {
        return cost_of(cost).read(start, end, chunk);
      },
      py::arg("cost"), py::arg("start"), py::arg("end"), py::arg("chunk"),
      "StepCost::read; cost: StepCost.columns.");
  m.def(
      "swapping_pays",
      [](const std::optional<Columns>& cost, std::int64_t pages, std::int64_t page_bytes,
         double bytes_per_second, std::int64_t start, std::int64_t end, int chunk) {
        return swapping_pays(cost ? cost_of(*cost) : StepCost{}, {bytes_per_second, page_bytes},
                             pages, start, end, chunk);
      },
      py::arg("cost"), py::kw_only(), py::arg("pages"), py::arg("page_bytes"),
      py::arg("bytes_per_second"), py::arg("start"), py::arg("end"), py::arg("chunk"),
      "cost: StepCost.columns, None: not known.");
}

}  // namespace specdec
