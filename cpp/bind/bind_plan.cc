// StepPlan: read-only NumPy views of the step's buffers, and a hand-made plan for tests.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>

#include "base/check.h"
#include "bind/array_argument.h"
#include "bind/registers.h"
#include "engine/plan_packet.h"
#include "engine/step_plan.h"

namespace py = pybind11;

namespace specdec {
namespace {

// A view that keeps `owner` (the plan's Python object) alive and cannot be written through.
template <typename T>
py::array_t<T> view_of(const std::vector<T>& data, std::vector<py::ssize_t> shape,
                       const py::object& owner) {
  py::array_t<T> array(std::move(shape), data.data(), owner);
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

template <typename T>
auto rows_property(std::vector<T> StepPlan::* field, int StepPlan::* count, int extra = 0) {
  return [field, count, extra](const py::object& self) {
    const auto& plan = self.cast<const StepPlan&>();
    return view_of(plan.*field, {plan.*count + extra}, self);
  };
}

std::unique_ptr<StepPlan> make_step_plan(const std::vector<std::vector<TokenId>>& tokens,
                                         const std::vector<std::vector<std::int32_t>>& parents,
                                         const std::vector<std::int32_t>& kv_len,
                                         const std::vector<std::vector<std::int32_t>>& page_table,
                                         bool logits_for_all_rows, bool needs_logits) {
  const int requests = static_cast<int>(tokens.size());
  SPECDEC_REQUIRE(requests >= 1, "tokens is empty: give at least one request");
  SPECDEC_REQUIRE(kv_len.size() == tokens.size() && page_table.size() == tokens.size(),
                  "tokens, kv_len and page_table have ", tokens.size(), ", ", kv_len.size(),
                  " and ", page_table.size(), " entries: one per request");
  SPECDEC_REQUIRE(parents.empty() || parents.size() == tokens.size(), "parents has ",
                  parents.size(), " entries, tokens ", tokens.size());
  int rows = 0;
  std::size_t pages = 1;
  for (int b = 0; b < requests; ++b) {
    SPECDEC_REQUIRE(!tokens[b].empty(), "tokens[", b, "] is empty: at least one row per request");
    SPECDEC_REQUIRE(kv_len[b] >= 0 && kv_len[b] + tokens[b].size() <= INT32_MAX, "kv_len[", b,
                    "] = ", kv_len[b], ": give 0..", INT32_MAX, " less the request's ",
                    tokens[b].size(), " rows");
    rows += static_cast<int>(tokens[b].size());
    pages = std::max(pages, page_table[b].size());
  }
  auto plan = std::make_unique<StepPlan>(requests, rows, static_cast<int>(pages));
  plan->needs_logits = needs_logits;
  int row = 0;
  for (int b = 0; b < requests; ++b) {
    const int n = static_cast<int>(tokens[b].size());
    const bool given = !parents.empty() && !parents[b].empty();
    SPECDEC_REQUIRE(!given || static_cast<int>(parents[b].size()) == n, "parents[", b, "] has ",
                    parents.empty() ? 0 : parents[b].size(), " entries, tokens[", b, "] ", n);
    std::vector<std::int32_t> chain(n), depth(n);
    for (int i = 0; i < n; ++i) chain[i] = i - 1;
    const std::vector<std::int32_t>& parent = given ? parents[b] : chain;
    if (given) validate_tree(tokens[b].data(), parent.data(), n, 0);
    derive_depths(parent.data(), n, depth.data());
    plan->is_tree[b] = given && !is_chain(parent.data(), n);
    if (plan->is_tree[b]) {
      derive_mask(parent.data(), n,
                  plan->mask.data() + static_cast<std::ptrdiff_t>(row) * kMaskWords);
    }
    plan->kv_len[b] = kv_len[b];
    plan->slot[b] = b;
    std::copy(page_table[b].begin(), page_table[b].end(),
              plan->page_table.begin() + static_cast<std::ptrdiff_t>(b) * plan->page_table_stride);
    plan->cu_logits[b] = plan->num_logit_rows;
    for (int i = 0; i < n; ++i) {
      plan->tokens[row + i] = tokens[b][i];
      plan->positions[row + i] = kv_len[b] + depth[i];
      plan->parents[row + i] = parent[i];
      if (logits_for_all_rows || i == n - 1) plan->logit_rows[plan->num_logit_rows++] = row + i;
    }
    row += n;
    plan->cu_rows[b + 1] = row;
    plan->cu_logits[b + 1] = plan->num_logit_rows;
  }
  plan->num_requests = requests;
  plan->num_rows = row;
  return plan;
}

}  // namespace

void register_plan(py::module_& m) {
  py::class_<StepPlan>(
      m, "StepPlan",
      "StepSizes of one step. Arrays are read-only views, valid until the executor's next plan().")
      .def(py::init<int, int, int>(), py::kw_only(), py::arg("max_requests"), py::arg("max_rows"),
           py::arg("max_pages_per_request"), "An empty plan, for fill_step_plan.")
      .def(
          "pack",
          [](StepPlan& plan, int page_size) {
            const std::vector<std::int32_t> words = pack_plan(plan, page_size);
            plan.kv_moves.clear();
            plan.page_orders.clear();
            return py::array_t<std::int32_t>(static_cast<py::ssize_t>(words.size()), words.data());
          },
          py::arg("page_size"),
          "The plan as int32 words, for unpack() on another rank. K/V moves and copies of pages "
          "that are "
          "due go with the first packet and no other.")
      .def(
          "unpack",
          [](StepPlan& plan, const ArrayArgument<std::int32_t>& words) {
            unpack_plan(words.data(), words.size(), &plan);
          },
          py::arg("words"), "Become the plan that another rank has packed.")
      .def_property_readonly(
          "kv_moves",
          [](const py::object& self) {
            const auto& moves = self.cast<const StepPlan&>().kv_moves;
            return view_of(moves, {static_cast<py::ssize_t>(moves.size() / 2), 2}, self);
          },
          "[M, 2] int32: what the last commit moved in the pages, from and to, as page * page size "
          "+ "
          "place in the page")
      .def_property_readonly(
          "page_orders",
          [](const py::object& self) {
            const auto& copies = self.cast<const StepPlan&>().page_orders;
            return view_of(copies, {static_cast<py::ssize_t>(copies.size() / 3), 3}, self);
          },
          "[N, 3] int32: what was done with pages behind those moves, as PagePools.follow() takes "
          "it")
      .def_readonly("num_requests", &StepPlan::num_requests)
      .def_readonly("num_rows", &StepPlan::num_rows)
      .def_readonly("num_logit_rows", &StepPlan::num_logit_rows)
      .def_readonly("num_prefill_rows", &StepPlan::num_prefill_rows)
      .def_readonly("needs_logits", &StepPlan::needs_logits)
      .def_readonly("generation", &StepPlan::generation)
      .def_readonly("step", &StepPlan::step)
      .def_property_readonly("tokens", rows_property(&StepPlan::tokens, &StepPlan::num_rows),
                             "[R] int32 token ids")
      .def_property_readonly("positions", rows_property(&StepPlan::positions, &StepPlan::num_rows),
                             "[R] int32 absolute positions")
      .def_property_readonly("parents", rows_property(&StepPlan::parents, &StepPlan::num_rows),
                             "[R] int32 parent row within the request, -1 for its first row")
      .def_property_readonly("cu_rows",
                             rows_property(&StepPlan::cu_rows, &StepPlan::num_requests, 1),
                             "[B + 1] int32 first row of each request")
      .def_property_readonly("kv_len", rows_property(&StepPlan::kv_len, &StepPlan::num_requests),
                             "[B] int32 tokens in the KV cache before the step")
      .def_property_readonly("is_tree", rows_property(&StepPlan::is_tree, &StepPlan::num_requests),
                             "[B] uint8, 0: the rows are a causal chain")
      .def_property_readonly("slot", rows_property(&StepPlan::slot, &StepPlan::num_requests),
                             "[B] int32 executor slot of each request")
      .def_property_readonly("request_ids",
                             rows_property(&StepPlan::request_ids, &StepPlan::num_requests),
                             "[B] int64 what submit() returned; 0 in a plan made by hand")
      .def_property_readonly("logit_rows",
                             rows_property(&StepPlan::logit_rows, &StepPlan::num_logit_rows),
                             "[L] int32 rows whose scores are needed")
      .def_property_readonly("cu_logits",
                             rows_property(&StepPlan::cu_logits, &StepPlan::num_requests, 1),
                             "[B + 1] int32 first logit row of each request")
      .def_property_readonly(
          "mask",
          [](const py::object& self) {
            const auto& plan = self.cast<const StepPlan&>();
            return view_of(plan.mask, {plan.num_rows, kMaskWords}, self);
          },
          "[R, 4] uint32 ancestor bits, least significant first; only valid where is_tree")
      .def_property_readonly(
          "page_table",
          [](const py::object& self) {
            const auto& plan = self.cast<const StepPlan&>();
            return view_of(plan.page_table, {plan.num_requests, plan.page_table_stride}, self);
          },
          "[B, max_pages] int32 page ids in token order; entries past the length are stale");
  m.def("make_step_plan", &make_step_plan, py::arg("tokens"), py::kw_only(),
        py::arg("parents") = std::vector<std::vector<std::int32_t>>{}, py::arg("kv_len"),
        py::arg("page_table"), py::arg("logits_for_all_rows") = true,
        py::arg("needs_logits") = true,
        "A plan made by hand, for calibration and tests. parents: per request, [] for a chain.");
}

}  // namespace specdec
