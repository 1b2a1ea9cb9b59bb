// _core.BeamSearch: beams of a drafter and their prefix tree.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "algo/beam_search_host.h"
#include "algo/slot.h"
#include "base/check.h"
#include "bind/array_argument.h"
#include "bind/dlpack_convert.h"
#include "bind/registers.h"

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

// Where laws go, if somebody wants them.
struct LawTensors {
  py::handle probs, ids, token_ids;
};

void propose_trees(BeamSearch& self, const SlotLayout& layout, py::handle slots,
                   const std::vector<std::int32_t>& slot_ids,
                   const std::vector<std::int32_t>& limits, int vocab_size,
                   const std::vector<std::int32_t>& law_rows, const LawTensors& tensors) {
  const BorrowedTensor blocks(slots, "slots", true);
  check_cpu(blocks.view(), "slots");
  check_contiguous(blocks.view(), "slots");
  check_dtype(blocks.view(), "slots", {DType::kU8});
  check_shape(blocks.view(), "slots", "[num_slots, slot_bytes]", {kAny, layout.bytes});
  const auto requests = static_cast<std::size_t>(self.num_requests());
  SPECDEC_REQUIRE(
      slot_ids.size() == requests && limits.size() == requests && law_rows.size() == requests,
      "propose: ", slot_ids.size(), " slot_ids, ", limits.size(), " limits, ", law_rows.size(),
      " law_rows, the search has ", requests, " requests");
  BorrowedTensor probs, ids, map;
  std::int64_t drafts = 0;
  if (!tensors.probs.is_none()) {
    probs = BorrowedTensor(tensors.probs, "probs", true);
    ids = BorrowedTensor(tensors.ids, "ids", true);
    check_shape(probs.view(), "probs", "[D, drafts, 50]", {kAny, kAny, BeamSearch::kKept});
    drafts = probs->shape[1];
    check_shape(ids.view(), "ids", "that of probs", {probs->shape[0], drafts, BeamSearch::kKept});
    check_dtype(probs.view(), "probs", {DType::kF32});
    check_dtype(ids.view(), "ids", {DType::kI32});
    for (const BorrowedTensor* tensor : {&probs, &ids}) {
      check_cpu(tensor->view(), "probs, ids");
      check_contiguous(tensor->view(), "probs, ids");
    }
    if (!tensors.token_ids.is_none()) map = BorrowedTensor(tensors.token_ids, "token_ids");
  }
  for (std::int32_t r = 0; r < self.num_requests(); ++r) {
    const std::int32_t id = slot_ids[r];
    SPECDEC_REQUIRE(id >= 0 && id < blocks->shape[0], "slot_ids[", r, "] = ", id, ": the pool has ",
                    blocks->shape[0], " slots");
    Slot* slot = reinterpret_cast<Slot*>(static_cast<std::byte*>(blocks->data) +
                                         std::int64_t{id} * layout.bytes);
    const std::int32_t len = slot_len_to_draft(slot, kMaxDraftLen);
    if (len == 0) continue;
    const BeamTree tree = self.tree(r, limits[r]);
    float survival[kMaxDraftLen];
    for (std::int32_t i = 0; i < tree.size; ++i) survival[i] = std::exp(tree.log_probs[i]);
    propose_draft(SerialTeam{}, slot->proposed_draft(), len, tree.tokens, tree.parents, survival,
                  tree.size, vocab_size);
    if (law_rows[r] < 0) continue;
    SPECDEC_REQUIRE(probs.defined() && law_rows[r] < probs->shape[0] && tree.size <= drafts,
                    "propose: law_rows[", r, "] = ", law_rows[r], " and ", tree.size,
                    " drafts do not fit into probs");
    const std::int64_t first = std::int64_t{law_rows[r]} * drafts * BeamSearch::kKept;
    self.tree_laws(r, tree, map.defined() ? static_cast<const TokenId*>(map->data) : nullptr,
                   static_cast<float*>(probs->data) + first,
                   static_cast<TokenId*>(ids->data) + first);
  }
}

void check_request(const BeamSearch& self, std::int32_t r) {
  SPECDEC_REQUIRE(r >= 0 && r < self.num_requests(), "request = ", r, ": there are 0..",
                  self.num_requests() - 1);
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
      "propose",
      [](BeamSearch& self, const SlotLayout& layout, py::handle slots,
         const std::vector<std::int32_t>& slot_ids, const std::vector<std::int32_t>& limits,
         int vocab_size, const std::vector<std::int32_t>& law_rows, py::handle probs,
         py::handle ids, py::handle token_ids) {
        propose_trees(self, layout, slots, slot_ids, limits, vocab_size, law_rows,
                      {probs, ids, token_ids});
      },
      py::arg("layout"), py::arg("slots"), py::arg("slot_ids"), py::arg("limits"), py::kw_only(),
      py::arg("vocab_size"), py::arg("law_rows"), py::arg("probs") = py::none(),
      py::arg("ids") = py::none(), py::arg("token_ids") = py::none(),
      "Each request's tree(), cut to its limit, into its slot, with the chance of each node. "
      "law_rows: the row of probs and ids, float32 and int32 [D, drafts, 50], that takes what the "
      "request's nodes were chosen from, with their tokens; -1: none. token_ids as advance().");
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
}

}  // namespace specdec
