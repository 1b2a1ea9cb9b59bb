// _core.RecurrentDrafter: ReDrafter's network over packed linear layers.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "algo/beam_search.h"
#include "backend/cpu/drafter/recurrent_drafter.h"
#include "backend/cpu/linear/linear_call.h"
#include "backend/cpu/linear/packed_linear.h"
#include "base/check.h"
#include "bind/dlpack_convert.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

using cpu::PackedLinear;
using cpu::RecurrentDrafter;

// The network and the Python objects that its layers and functions live in.
struct RecurrentDrafterObject {
  std::vector<py::object> kept;
  std::unique_ptr<RecurrentDrafter> network;
};

// An array over memory of the network, for the duration of a call.
template <typename T>
py::array_t<T> view_of(const T* data, std::vector<py::ssize_t> shape) {
  return py::array_t<T>(std::move(shape), const_cast<T*>(data), py::none());
}

TensorView rows_view(const float* data, std::int64_t rows, std::int64_t columns) {
  TensorView view;
  view.data = const_cast<float*>(data);
  view.ndim = 2;
  view.shape = {rows, columns};
  view.strides = {columns, 1};
  return view;
}

RecurrentDrafter::ScoreRows head_of(py::handle head, std::int64_t exit_dim,
                                    std::int64_t num_scores) {
  if (!py::isinstance<PackedLinear>(head)) {
    return [=](const float* x, std::int64_t rows, float* scores) {
      const py::gil_scoped_acquire acquire;
      head(view_of(x, {rows, exit_dim}), view_of(scores, {rows, num_scores}));
    };
  }
  const auto* linear = head.cast<const PackedLinear*>();
  SPECDEC_REQUIRE(linear->n() == num_scores && linear->k() == exit_dim, "head has shape [",
                  linear->n(), ", ", linear->k(), "], expected [num_scores = ", num_scores,
                  ", exit_dim = ", exit_dim, "]");
  return [=](const float* x, std::int64_t rows, float* scores) {
    cpu::run_linear(*linear, rows_view(x, rows, exit_dim), rows_view(scores, rows, num_scores));
  };
}

std::unique_ptr<RecurrentDrafterObject> make(std::int64_t hidden_size, std::int64_t num_scores,
                                             const py::object& recurrence,
                                             const py::object& projection, const py::list& blocks,
                                             const py::object& embed, const py::object& head) {
  auto self = std::make_unique<RecurrentDrafterObject>();
  self->kept = {recurrence, projection, blocks, embed, head};
  cpu::RecurrentLayers layers;
  if (!recurrence.is_none()) layers.recurrence = recurrence.cast<const PackedLinear*>();
  if (!projection.is_none()) layers.projection = projection.cast<const PackedLinear*>();
  for (const py::handle block : blocks) {
    self->kept.push_back(py::reinterpret_borrow<py::object>(block));
    layers.blocks.push_back(block.cast<const PackedLinear*>());
  }
  const std::int64_t exit_dim =
      layers.projection != nullptr ? layers.projection->n() : 2 * hidden_size;
  const py::handle rows_of = embed;
  auto embed_rows = [=](const TokenId* tokens, std::int64_t count, float* out) {
    const py::gil_scoped_acquire acquire;
    rows_of(view_of(tokens, {count}), view_of(out, {count, hidden_size}));
  };
  self->network = std::make_unique<RecurrentDrafter>(hidden_size, num_scores, std::move(layers),
                                                     std::move(embed_rows),
                                                     head_of(head, exit_dim, num_scores));
  return self;
}

void start(RecurrentDrafterObject& self, const py::object& hidden, const py::object& tokens) {
  const BorrowedTensor rows(hidden, "hidden"), ids(tokens, "tokens");
  check_cpu(rows.view(), "hidden");
  check_dtype(rows.view(), "hidden", {DType::kF32});
  check_shape(rows.view(), "hidden", "[B, H]", {kAny, self.network->hidden_size()});
  check_last_axis_contiguous(rows.view(), "hidden");
  check_cpu(ids.view(), "tokens");
  check_dtype(ids.view(), "tokens", {DType::kI32});
  check_shape(ids.view(), "tokens", "[B]", {rows->shape[0]});
  check_contiguous(ids.view(), "tokens");
  self.network->start(static_cast<const float*>(rows->data), rows->strides[0],
                      static_cast<const TokenId*>(ids->data), rows->shape[0]);
}

void advance(const RecurrentDrafterObject& self, BeamSearch& search, const py::object& token_ids) {
  std::optional<BorrowedTensor> ids;
  if (!token_ids.is_none()) {
    ids.emplace(token_ids, "token_ids");
    check_cpu(ids->view(), "token_ids");
    check_contiguous(ids->view(), "token_ids");
    check_dtype(ids->view(), "token_ids", {DType::kI32});
    check_shape(ids->view(), "token_ids", "[V]", {self.network->num_scores()});
  }
  const TokenId* const map = ids ? static_cast<const TokenId*>((*ids)->data) : nullptr;
  const py::gil_scoped_release release;
  self.network->advance(&search, map);
}

constexpr const char* kDoc = R"(ReDrafter's network over packed linear layers.

start(), then as long as the BeamSearch has rows: score(search), advance(search). Layers are
PackedLinear: ``recurrence`` [H, 2H] or None (states add up embeddings), ``projection`` [E, 2H] or
None (E = 2H), ``blocks`` [E, E] each. ``embed(ids, out)`` writes rows of the target's embedding
table, int32 [n] into float32 [n, H]; ``head`` is a PackedLinear [num_scores, E] or a function
(x, out) of float32 [n, E] and [n, num_scores]. The arrays of both are valid during the call only.
Raises ValueError naming the layer that does not fit.)";

}  // namespace

void register_recurrent_drafter(py::module_& m) {
  py::class_<RecurrentDrafterObject>(m, "RecurrentDrafter", kDoc)
      .def(py::init(&make), py::kw_only(), py::arg("hidden_size"), py::arg("num_scores"),
           py::arg("recurrence"), py::arg("projection"), py::arg("blocks"), py::arg("embed"),
           py::arg("head"))
      .def("start", &start, py::arg("hidden"), py::arg("tokens"),
           "One request a row: the target's last hidden state, float32 [B, H], and last token, "
           "int32 [B].")
      .def(
          "score",
          [](RecurrentDrafterObject& self, const BeamSearch& search) {
            const py::gil_scoped_release release;
            self.network->score(search);
          },
          py::arg("search"), "Score the rows of the search. Releases the GIL.")
      .def("advance", &advance, py::arg("search"), py::arg("token_ids") = py::none(),
           "BeamSearch.advance with these scores; ``token_ids`` int32 [num_scores].")
      .def_property_readonly(
          "scores",
          [](const RecurrentDrafterObject& self) {
            const RecurrentDrafter& network = *self.network;
            return py::array_t<float>({network.num_rows(), network.num_scores()}, network.scores());
          },
          "float32 [rows, num_scores]: a copy of what the last score() found.");
}

}  // namespace specdec
