// The law of a step's time and the draft budget, for drafters in Python.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "bind/registers.h"
#include "engine/budget.h"
#include "engine/step_cost.h"
#include "engine/step_times.h"

namespace py = pybind11;

namespace specdec {
namespace {

using Table = std::map<int, double>;
using TableArgument = py::typing::Dict<py::int_, py::float_>;

StepCost make_step_cost(const TableArgument& seconds_of, const TableArgument& growth_of,
                        double context_len) {
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
  return StepCost(std::move(rows), std::move(seconds), context_len, std::move(added));
}

py::array_t<double> seconds_from(const StepCost& cost, int first, int more) {
  SPECDEC_REQUIRE(first >= 0 && more >= 0, "StepCost.seconds: first = ", first, ", more = ", more,
                  ": not negative");
  py::array_t<double> result(more + 1);
  for (int i = 0; i <= more; ++i) result.mutable_at(i) = cost(first + i);
  return result;
}

using Gains = py::array_t<double, py::array::c_style | py::array::forcecast>;

using CutDrafts = std::tuple<std::vector<py::array_t<std::int64_t>>, double, double>;

CutDrafts cut_drafts(const std::vector<Gains>& gains, const StepCost& cost, int rows, double tokens,
                     int max_more_rows, double fixed, double each, double spent, double rate,
                     const std::optional<StepCost>& pass_cost, int pass_rows) {
  SPECDEC_REQUIRE(cost.known(), "cut_drafts: cost has no points");
  std::vector<Offer> offers;
  for (const Gains& nodes : gains) {
    SPECDEC_REQUIRE(nodes.ndim() == 1, "cut_drafts: gains have ", nodes.ndim(),
                    " axes: one for each request");
    offers.push_back({nodes.data(), static_cast<int>(nodes.size())});
  }
  const StepBase step{cost,          rows,  tokens, max_more_rows,
                      {fixed, each}, spent, rate,   pass_cost ? &*pass_cost : nullptr,
                      pass_rows};
  const Cut cut = Budget().cut(offers, step);
  std::vector<py::array_t<std::int64_t>> kept;
  for (const Offer& offer : offers) {
    const std::vector<int> nodes = kept_nodes(offer);
    py::array_t<std::int64_t> indices(static_cast<py::ssize_t>(nodes.size()));
    std::copy(nodes.begin(), nodes.end(), indices.mutable_data());
    kept.push_back(indices);
  }
  return {kept, cut.tokens, cut.speedup()};
}

}  // namespace

void register_budget(py::module_& m) {
  py::class_<StepCost>(m, "StepCost",
                       "T(rows, context), seconds of one forward pass: linear between measured "
                       "points, behind the last with the slope over four. See "
                       "cpp/engine/step_cost.h.")
      .def(py::init(&make_step_cost), py::arg("table"), py::arg("growth") = py::dict(),
           py::arg("context_len") = 0.0,
           "table: {rows: seconds}, 1 row and at least one more count, of a pass of one request "
           "with `context_len` tokens in the cache. growth: {rows: seconds} that each token more "
           "adds; empty: nothing.")
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
      .def("__call__", &StepCost::operator(), py::arg("rows"))
      .def("seconds", &seconds_from, py::arg("first"), py::arg("more"),
           "[more + 1]: of first, first + 1, ..., first + more rows.")
      .def_property_readonly(
          "columns",
          [](const StepCost& self) {
            return py::make_tuple(self.rows(), self.seconds(), self.context_len(), self.growth());
          },
          "(rows, seconds, context_len, growth), as Executor.set_step_cost() takes them.");

  py::class_<StepTimes>(m, "StepTimes",
                        "T(rows, context) refined by the steps that are served anyway. See "
                        "cpp/engine/step_times.h.")
      .def(py::init<StepCost>(), py::arg("start"), "start: the table to begin with.")
      .def("observe", py::overload_cast<const StepPlan&, double>(&StepTimes::observe),
           py::arg("plan"), py::arg("seconds"),
           "The forward pass of `plan` took `seconds`. True: cost has changed.")
      .def_property_readonly("cost", &StepTimes::cost)
      .def_property_readonly("observed", &StepTimes::observed, "Steps that counted.");

  m.def(
      "cut_drafts", &cut_drafts, py::arg("gains"), py::arg("cost"), py::kw_only(), py::arg("rows"),
      py::arg("tokens"), py::arg("max_more_rows") = 1 << 30, py::arg("fixed") = 0.0,
      py::arg("each") = 0.0, py::arg("spent") = 0.0, py::arg("rate") = 0.0,
      py::arg("pass_cost") = py::none(), py::arg("pass_rows") = 0,
      "Which drafts of each request are worth verifying (cpp/engine/budget.h).\n\n"
      "gains: per request the chance of each draft, parents first. rows, tokens: of the step "
      "without them. fixed, each, spent: seconds of drafting, if anybody drafts, for each draft "
      "of the request that drafts most, and in any case. rate: 0 to weigh the step by itself, "
      "else what a second is worth in tokens. pass_cost: of one more pass of a draft model, a row "
      "for each draft and pass_rows of others.\n\n"
      "Returns (per request the ascending indices of the drafts kept; expected tokens of the "
      "step; its speed over that of a step without drafts).");
}

}  // namespace specdec
