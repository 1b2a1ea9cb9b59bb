// _core.RecurrentDrafter: ReDrafter's network over packed linear layers.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/cpu/drafter/recurrent_drafter.h"
#include "backend/cpu/linear/linear_call.h"
#include "backend/cpu/linear/packed_linear.h"
#include "base/check.h"
#include "bind/drafter_arguments.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

// Values of a hidden state, and scores of a head.
constexpr std::int64_t kMaxWidth = 1 << 24;

using cpu::PackedLinear;
using cpu::RecurrentDrafter;
using cpu::SearchCost;

RecurrentDrafter::EmbedRows embedding_of(const DecoderObject& target, std::int64_t hidden_size) {
  const auto* decoder = &target.decoder;
  SPECDEC_REQUIRE(decoder->config().hidden_size == hidden_size,
                  "target: the decoder's hidden_size is ", decoder->config().hidden_size,
                  ", expected ", hidden_size);
  return [=](const TokenId* tokens, std::int64_t count, float* out) {
    decoder->embedding_rows(tokens, count, out);
  };
}

// The target's head where `head` is None.
RecurrentDrafter::ScoreRows head_of(DecoderObject& target, const py::object& head,
                                    std::int64_t exit_dim, std::int64_t num_scores) {
  if (head.is_none()) return target_scores(target, exit_dim, num_scores);
  const PackedLinear* linear = layer_argument(head, "head");
  SPECDEC_REQUIRE(linear->n() == num_scores && linear->k() == exit_dim, "head has shape [",
                  linear->n(), ", ", linear->k(), "], expected [num_scores = ", num_scores,
                  ", exit_dim = ", exit_dim, "]");
  return [=](const float* x, std::int64_t rows, float* scores) {
    cpu::run_linear(*linear, cpu::rows_view(x, rows, exit_dim),
                    cpu::rows_view(scores, rows, num_scores));
  };
}

std::unique_ptr<RecurrentDrafterObject> make(std::int64_t hidden_size, std::int64_t num_scores,
                                             const py::object& recurrence,
                                             const py::object& projection, const py::list& blocks,
                                             const py::object& target, const py::object& head) {
  SPECDEC_REQUIRE(
      hidden_size >= 1 && hidden_size <= kMaxWidth && num_scores >= 1 && num_scores <= kMaxWidth,
      "hidden_size = ", hidden_size, ", num_scores = ", num_scores, ": give 1..", kMaxWidth,
      " of each");
  auto self = std::make_unique<RecurrentDrafterObject>();
  self->kept = {recurrence, projection, blocks, target, head};
  cpu::RecurrentLayers layers;
  if (!recurrence.is_none()) layers.recurrence = layer_argument(recurrence, "recurrence");
  if (!projection.is_none()) layers.projection = layer_argument(projection, "projection");
  for (const py::handle block : blocks) {
    self->kept.push_back(py::reinterpret_borrow<py::object>(block));
    layers.blocks.push_back(
        layer_argument(block, detail::join("blocks[", layers.blocks.size(), "]")));
  }
  const std::int64_t exit_dim =
      layers.projection != nullptr ? layers.projection->n() : 2 * hidden_size;
  DecoderObject& decoder = target_argument(target);
  self->network = std::make_unique<RecurrentDrafter>(hidden_size, num_scores, std::move(layers),
                                                     embedding_of(decoder, hidden_size),
                                                     head_of(decoder, head, exit_dim, num_scores));
  return self;
}

constexpr const char* kDoc = R"(ReDrafter's network over packed linear layers.

A BeamDrafter searches with it. Layers are PackedLinear: ``recurrence`` [H, 2H] or None (states add
up embeddings), ``projection`` [E, 2H] or None (E = 2H), ``blocks`` [E, E] each, ``head``
[num_scores, E] or None: the target's. ``target`` is the target's LlamaDecoder, whose embedding rows are read. Raises ValueError
naming the layer that does not fit.)";

}  // namespace

void register_recurrent_drafter(py::module_& m) {
  py::class_<SearchCost>(m, "SearchCost", "What BeamDrafter.draft() took.")
      .def_readonly("passes", &SearchCost::passes)
      .def_readonly("rows", &SearchCost::rows, "Of all passes.")
      .def_readonly("seconds", &SearchCost::seconds)
      .def_readonly("network_seconds", &SearchCost::network_seconds, "In the layers.")
      .def_readonly("network_thread_seconds", &SearchCost::network_thread_seconds,
                    "In the layers, processor time of the calling thread.");
  py::class_<RecurrentDrafterObject>(m, "RecurrentDrafter", kDoc)
      .def(py::init(&make), py::kw_only(), py::arg("hidden_size"), py::arg("num_scores"),
           py::arg("recurrence"), py::arg("projection"), py::arg("blocks"), py::arg("target"),
           py::arg("head"));
}

}  // namespace specdec
