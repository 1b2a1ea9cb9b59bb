// _core_testing.BeamSearch: beams of a drafter and their prefix tree; ReDrafter's network, depth by
// depth. The product runs a whole search in one call (_core.BeamDrafter).
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "algo/beam_search_host.h"
#include "backend/cpu/drafter/recurrent_drafter.h"
#include "base/check.h"
#include "base/thread_pool.h"
#include "bind/array_argument.h"
#include "bind/dlpack_convert.h"
#include "bind/drafter_arguments.h"

namespace py = pybind11;

namespace specdec {
namespace {

using BeamIds = ArrayArgument<TokenId>;
using BeamReals = ArrayArgument<float>;

template <typename T>
py::array_t<T> copied(const T* data, std::int64_t n) {
  return py::array_t<T>(n, data);
}

void start_beams(BeamSearch& self, const BeamIds& num_beams, const BeamIds& lengths,
                 const std::optional<BeamReals>& temperatures,
                 const std::optional<std::vector<bool>>& keeps_laws) {
  const py::ssize_t n = num_beams.size();
  SPECDEC_REQUIRE(!keeps_laws || static_cast<py::ssize_t>(keeps_laws->size()) == n,
                  "keeps_laws has ", keeps_laws ? keeps_laws->size() : 0, " entries, num_beams ",
                  n);
  SPECDEC_REQUIRE(num_beams.ndim() == 1 && lengths.ndim() == 1 && lengths.size() == n &&
                      (!temperatures || (temperatures->ndim() == 1 && temperatures->size() == n)),
                  "expected num_beams [B], lengths [B] and temperatures [B], num_beams has ", n,
                  " entries");
  std::vector<BeamShape> shapes(static_cast<std::size_t>(n));
  for (py::ssize_t i = 0; i < n; ++i) {
    shapes[i] = {num_beams.data()[i], lengths.data()[i],
                 temperatures ? temperatures->data()[i] : 1.0f,
                 keeps_laws && (*keeps_laws)[static_cast<std::size_t>(i)]};
  }
  self.start(shapes);
}

void advance_beams(BeamSearch& self, const py::object& scores, const py::object& token_ids) {
  const BorrowedTensor rows(scores, "scores");
  check_cpu(rows.view(), "scores");
  check_dtype(rows.view(), "scores", {DType::kF32});
  check_shape(rows.view(), "scores", "[num_rows, V]", {self.num_rows(), kAny});
  check_last_axis_contiguous(rows.view(), "scores");
  std::optional<BorrowedTensor> ids;
  if (!token_ids.is_none()) {
    ids.emplace(token_ids, "token_ids");
    check_cpu(ids->view(), "token_ids");
    check_contiguous(ids->view(), "token_ids");
    check_dtype(ids->view(), "token_ids", {DType::kI32});
    check_shape(ids->view(), "token_ids", "[V]", {rows->shape[1]});
  }
  const TokenId* const map = ids ? static_cast<const TokenId*>((*ids)->data) : nullptr;
  py::gil_scoped_release release;
  self.advance(static_cast<const float*>(rows->data), rows->strides[0],
               static_cast<std::int32_t>(rows->shape[1]), map);
}

void check_request(const BeamSearch& self, std::int32_t r) {
  SPECDEC_REQUIRE(r >= 0 && r < self.num_requests(), "request = ", r, ": there are 0..",
                  self.num_requests() - 1);
}

void start_network(RecurrentDrafterObject& self, const std::vector<py::object>& hidden,
                   const std::vector<TokenId>& tokens) {
  SPECDEC_REQUIRE(hidden.size() == tokens.size(), "hidden has ", hidden.size(),
                  " rows, tokens has ", tokens.size());
  const std::int64_t size = self.network->hidden_size();
  std::vector<BorrowedTensor> rows;
  rows.reserve(tokens.size());
  std::vector<const float*> data;
  data.reserve(tokens.size());
  for (const py::object& given : hidden) {
    const BorrowedTensor& row = rows.emplace_back(given, "hidden");
    check_cpu(row.view(), "hidden");
    check_dtype(row.view(), "hidden", {DType::kF32});
    check_shape(row.view(), "hidden", "[H]", {size});
    check_contiguous(row.view(), "hidden");
    data.push_back(static_cast<const float*>(row->data));
  }
  self.network->start(data, tokens);
}

void advance_network(const RecurrentDrafterObject& self, BeamSearch& search,
                     const py::object& token_ids) {
  const std::vector<TokenId> map = token_ids_argument(token_ids, self.network->num_scores());
  const py::gil_scoped_release release;
  self.network->advance(&search, map.empty() ? nullptr : map.data());
}

cpu::SearchCost run_network(RecurrentDrafterObject& self, BeamSearch& search,
                            const py::object& token_ids, std::vector<double> gains,
                            double pass_seconds) {
  const std::vector<TokenId> map = token_ids_argument(token_ids, self.network->num_scores());
  const py::gil_scoped_release release;
  return self.network->run(&search, map.empty() ? nullptr : map.data(),
                           {std::move(gains), pass_seconds});
}

constexpr const char* kBeamSearchDoc =
    R"(Beam search over a drafter's scores, for several requests at once.

start(), then as long as num_rows > 0: score the rows, advance(). A beam is
extended by the 50 best scores of its row (smaller index first on ties); sums of log-probabilities
in single precision decide, on ties the beam that stood first.)";

}  // namespace

void register_beams(py::module_& m) {
  py::class_<BeamSearch> search(m, "BeamSearch", kBeamSearchDoc);
  search.def(py::init<>())
      .def("start", &start_beams, py::arg("num_beams"), py::arg("lengths"),
           py::arg("temperatures") = py::none(), py::arg("keeps_laws") = py::none(),
           "One row per request. int32 [B] each; beams x length at most 127. temperatures [B] "
           "divide the scores; None: 1. keeps_laws [B]: tree_laws() will be asked for.")
      .def("advance", &advance_beams, py::arg("scores"), py::arg("token_ids") = py::none(),
           "scores float32 [num_rows, V], its index's token from token_ids int32 [V], None: the "
           "index.")
      .def_property_readonly("num_rows", &BeamSearch::num_rows, "Beams that want scores.")
      .def_property_readonly(
          "row_parents",
          [](const BeamSearch& self) { return copied(self.row_parents().data(), self.num_rows()); },
          "int32 [num_rows]: the row of the depth before that each extends.")
      .def_property_readonly(
          "row_tokens",
          [](const BeamSearch& self) { return copied(self.row_tokens().data(), self.num_rows()); },
          "int32 [num_rows]: the last token of each, -1 after start().")
      .def_property_readonly(
          "row_log_probs",
          [](const BeamSearch& self) {
            return copied(self.row_log_probs().data(), self.num_rows());
          },
          "float32 [num_rows]: the log-probability of each beam.")
      .def(
          "tree",
          [](BeamSearch& self, std::int32_t r, std::int32_t max_drafts) {
            check_request(self, r);
            SPECDEC_REQUIRE(max_drafts >= 0, "max_drafts = ", max_drafts, ": 0 or more");
            const BeamTree tree = self.tree(r, max_drafts);
            return py::make_tuple(copied(tree.tokens, tree.size), copied(tree.parents, tree.size),
                                  copied(tree.depths, tree.size),
                                  copied(tree.log_probs, tree.size));
          },
          py::arg("request"), py::arg("max_drafts") = kMaxDraftLen,
          "(tokens, parents, depths, log_probs) of the beams' prefix tree, the likeliest node "
          "first; "
          "parents -1 and depth 1 behind the golden token; cut to max_drafts nodes.");
  search.def(
      "tree_laws",
      [](BeamSearch& self, std::int32_t r, std::int32_t max_drafts, std::int32_t num_scores) {
        check_request(self, r);
        SPECDEC_REQUIRE(max_drafts >= 0 && num_scores >= 1, "max_drafts = ", max_drafts,
                        ", num_scores = ", num_scores, ": 0 or more, 1 or more");
        const py::ssize_t n = self.tree(r, max_drafts).size;
        py::array_t<float> out({n, static_cast<py::ssize_t>(num_scores)});
        self.tree_laws(r, max_drafts, num_scores, out.mutable_data());
        return out;
      },
      py::arg("request"), py::arg("max_drafts"), py::arg("num_scores"),
      "float32 [nodes, num_scores]: the softmax over the 50 best scores that each node of tree() "
      "was chosen from, by column of the scores. For a request that keeps_laws.");
  // A module has a pool of its own: the core's counts for the core.
  m.def("set_num_threads", [](int n) { ThreadPool::global().resize(n); }, py::arg("num_threads"));
  m.def("start_network", &start_network, py::arg("network"), py::arg("hidden"), py::arg("tokens"),
        "One request a row: the target's last hidden state, float32 [H], and last token.");
  m.def(
      "score_network",
      [](RecurrentDrafterObject& self, const BeamSearch& search) {
        {
          const py::gil_scoped_release release;
          self.network->score(search);
        }
        const cpu::RecurrentDrafter& network = *self.network;
        return py::array_t<float>({network.num_rows(), network.num_scores()}, network.scores());
      },
      py::arg("network"), py::arg("search"),
      "Score the rows of the search: float32 [rows, num_scores].");
  m.def("advance_network", &advance_network, py::arg("network"), py::arg("search"),
        py::arg("token_ids") = py::none(),
        "BeamSearch.advance with these scores; token_ids int32 [num_scores].");
  m.def("run_network", &run_network, py::arg("network"), py::arg("search"),
        py::arg("token_ids") = py::none(), py::arg("gains") = std::vector<double>(),
        py::arg("pass_seconds") = 0.0,
        "What score_network() and advance_network() do until the search ends. Ends early where the "
        "sum of the beams' probabilities times gains[depth - 1], the seconds that an expected "
        "draft of that depth saves, is less than pass_seconds (0: what the first pass took).");
}

}  // namespace specdec
