// The law of a step's time.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "bind/registers.h"
#include "engine/step_cost.h"
#include "engine/step_times.h"

namespace py = pybind11;

namespace specdec {
namespace {

using Table = std::map<int, double>;
using TableArgument = py::typing::Dict<py::int_, py::float_>;

StepCost make_step_cost(const TableArgument& seconds_of, const TableArgument& growth_of,
                        double context_len, const std::pair<double, double>& prefill) {
  Table table, growth;
  try {
    table = seconds_of.cast<Table>();
    growth = growth_of.cast<Table>();
  } catch (const py::cast_error&) {
    throw py::type_error("StepCost: a table is a dict of row counts and seconds, {int: float}");
  }
  std::vector<int> rows;
  std::vector<double> seconds, added;
  for (const auto& [count, time] : table) {
    rows.push_back(count);
    seconds.push_back(time);
  }
  for (const auto& [count, time] : growth) {
    SPECDEC_REQUIRE(table.contains(count), "StepCost.growth has ", count,
                    " rows, which the table does not have: give as many or none");
    added.push_back(time);
  }
  return StepCost(std::move(rows), std::move(seconds), context_len, std::move(added),
                  {prefill.first, prefill.second});
}

py::array_t<double> seconds_from(const StepCost& cost, int first, int more) {
  SPECDEC_REQUIRE(first >= 0 && more >= 0, "StepCost.seconds: first = ", first, ", more = ", more,
                  ": not negative");
  py::array_t<double> result(more + 1);
  for (int i = 0; i <= more; ++i) result.mutable_at(i) = cost(first + i);
  return result;
}

}  // namespace

void register_step_cost(py::module_& m) {
  py::class_<StepCost>(m, "StepCost",
                       "T(rows, context), seconds of one forward pass: linear between measured "
                       "points, after the last with the slope over four. See "
                       "cpp/engine/step_cost.h.")
      .def(py::init(&make_step_cost), py::arg("table"), py::arg("growth") = py::dict(),
           py::arg("context_len") = 0.0, py::arg("prefill") = std::pair(1.0, 1.0),
           "table: {rows: seconds}, 1 row and at least one more count, of a pass of one request "
           "with `context_len` tokens in the cache. growth: {rows: seconds} that each token more "
           "adds; empty: nothing. prefill: rows of prompts cost so many times what the table says, "
           "and the text that they read so many times what growth says.")
      .def(
          "at",
          [](const StepCost& self, int requests, double context_len) {
            StepCost now;
            self.at(requests, context_len, &now);
            return now;
          },
          py::arg("requests"), py::arg("context_len"),
          "Of steps of `requests` requests with `context_len` tokens in the cache, on average: "
          "their rows share the weights, each reads a cache of its own.")
      .def("prefill", &StepCost::prefill, py::arg("base"), py::arg("rows"), py::arg("start"),
           "Seconds that `rows` rows of a prompt, `start` tokens of which were read before, add to "
           "a pass of `base` rows.")
      .def("__call__", &StepCost::operator(), py::arg("rows"))
      .def("seconds", &seconds_from, py::arg("first"), py::arg("more"),
           "[more + 1]: of first, first + 1, ..., first + more rows.")
      .def_property_readonly(
          "columns",
          [](const StepCost& self) {
            const PrefillScale& prefill = self.prefill_scale();
            return py::make_tuple(self.rows(), self.seconds(), self.context_len(), self.growth(),
                                  py::make_tuple(prefill.rows, prefill.context));
          },
          "(rows, seconds, context_len, growth, prefill), as Executor.set_step_cost() takes them.");

  py::class_<StepTimes>(m, "StepTimes",
                        "T(rows, context) refined by the steps that are served anyway. See "
                        "cpp/engine/step_times.h.")
      .def(py::init<StepCost>(), py::arg("start"), "start: the table to begin with.")
      .def(py::init<StepCost, StepCost>(), py::arg("start"), py::arg("guess"),
           "guess: what rows are taken to cost that looked dear and were not seen for long.")
      .def("observe", py::overload_cast<const StepPlan&, double>(&StepTimes::observe),
           py::arg("plan"), py::arg("seconds"),
           "The forward pass of `plan` took `seconds`. True: cost has changed.")
      .def_property_readonly("cost", &StepTimes::cost)
      .def_property_readonly("observed", &StepTimes::observed, "Steps that counted.");
}

}  // namespace specdec
