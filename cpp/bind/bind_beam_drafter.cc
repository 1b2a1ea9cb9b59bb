// _core.BeamDrafter: ReDrafter's search for the requests of a step.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "backend/cpu/drafter/beam_drafter.h"
#include "base/check.h"
#include "bind/drafter_arguments.h"
#include "bind/op_arguments.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

using cpu::BeamDrafter;
using cpu::BeamLaws;
using cpu::BeamOptions;

// Slots of an engine.
constexpr std::int32_t kMaxBeamRequests = 1 << 20;

// Python keeps the network that it runs.
struct BeamDrafterObject {
  std::int64_t hidden_size;
  std::unique_ptr<BeamDrafter> drafter;
};

std::unique_ptr<BeamDrafterObject> make_beam_drafter(RecurrentDrafterObject& network,
                                                     const py::object& token_ids,
                                                     std::int32_t max_requests,
                                                     std::int32_t vocab_size) {
  SPECDEC_REQUIRE(max_requests >= 1 && max_requests <= kMaxBeamRequests && vocab_size >= 1,
                  "max_requests = ", max_requests, ", vocab_size = ", vocab_size, ": give 1..",
                  kMaxBeamRequests, " and at least 1");
  auto* const layers = network.network.get();
  auto self = std::make_unique<BeamDrafterObject>();
  self->hidden_size = layers->hidden_size();
  self->drafter = std::make_unique<BeamDrafter>(
      layers, token_ids_argument(token_ids, layers->num_scores()), max_requests, vocab_size);
  return self;
}

cpu::SearchCost draft_beams(BeamDrafterObject& self, const SlotLayout& layout, py::handle slots,
                            py::handle slot_ids, py::handle max_drafts, py::handle hidden,
                            double pass_price, py::handle probs, py::handle ids,
                            py::handle has_probs) {
  const SlotRequestsArgument step("BeamDrafter.draft", layout, slots, slot_ids, max_drafts, hidden,
                                  self.hidden_size);
  BeamLaws laws;
  BorrowedTensor values, tokens, flags;
  if (!probs.is_none()) {
    values = BorrowedTensor(probs, "probs", true);
    tokens = BorrowedTensor(ids, "ids", true);
    flags = BorrowedTensor(has_probs, "has_probs", true);
    check_shape(values.view(), "probs", "[>= B, drafts, 50]", {kAny, kAny, BeamSearch::kKept});
    const std::int64_t rows = values->shape[0];
    check_shape(tokens.view(), "ids", "that of probs", {rows, values->shape[1], BeamSearch::kKept});
    check_shape(flags.view(), "has_probs", "[>= B]", {rows});
    SPECDEC_REQUIRE(rows >= step.view().num_requests, "probs has ", rows, " rows, the step ",
                    step.view().num_requests, " requests");
    check_dtype(values.view(), "probs", {DType::kF32});
    check_dtype(tokens.view(), "ids", {DType::kI32});
    check_dtype(flags.view(), "has_probs", {DType::kU8});
    for (const BorrowedTensor* tensor : {&values, &tokens, &flags}) {
      check_cpu(tensor->view(), "probs, ids, has_probs");
      check_contiguous(tensor->view(), "probs, ids, has_probs");
    }
    laws = {static_cast<float*>(values->data), static_cast<TokenId*>(tokens->data),
            static_cast<std::uint8_t*>(flags->data), values->shape[1]};
  }
  const py::gil_scoped_release release;
  return self.drafter->draft(step.view(), pass_price, laws);
}

constexpr const char* kDraftBeamsDoc =
    R"(Search beams for a step's requests and put their trees into the slots.

layout, slots  of the pool, uint8 [num_slots, slot_bytes]
slot_ids       int32 [B], -1: nobody
max_drafts     int32 [B] drafts of this step, 0: none
hidden         float32 [num_slots, H]: the head's input that each slot's last token was chosen from
pass_price     tokens that a pass after the first has to bring, where all requests are adaptive
probs, ids, has_probs
               float32 and int32 [>= B, drafts, 50] and uint8 [>= B]: take what the drafts of requests
               that keep their laws were chosen from, and who has such; None: nobody asks

Releases the GIL. Returns what the search took; no passes: nobody drafted.)";

}  // namespace

void register_beam_drafter(py::module_& m) {
  py::class_<BeamDrafterObject>(m, "BeamDrafter",
                                "Drafts a RecurrentDrafter's beams for the requests of a step.")
      .def(py::init(&make_beam_drafter), py::keep_alive<1, 2>(), py::arg("network"), py::kw_only(),
           py::arg("token_ids") = py::none(), py::arg("max_requests"), py::arg("vocab_size"),
           "``token_ids`` int32 [num_scores]: the token of each score, None: the same number.")
      .def(
          "enter",
          [](BeamDrafterObject& self, std::int32_t slot, std::int32_t num_beams,
             std::int32_t length, float temperature, bool adaptive, bool keeps_laws) {
            self.drafter->enter(slot, {num_beams, length, temperature, adaptive, keeps_laws});
          },
          py::arg("slot"), py::kw_only(), py::arg("num_beams") = 0, py::arg("length") = 0,
          py::arg("temperature") = 1.0f, py::arg("adaptive") = false, py::arg("keeps_laws") = false,
          "A request takes a slot; ``num_beams`` 0: it wants no drafts. An adaptive one searches "
          "no "
          "wider and deeper than its step has drafts.")
      .def("draft", &draft_beams, py::arg("layout"), py::arg("slots"), py::arg("slot_ids"),
           py::arg("max_drafts"), py::arg("hidden"), py::kw_only(), py::arg("pass_price") = 0.0,
           py::arg("probs") = py::none(), py::arg("ids") = py::none(),
           py::arg("has_probs") = py::none(), kDraftBeamsDoc);
}

}  // namespace specdec
