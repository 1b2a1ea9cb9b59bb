// Arguments of the networks that draft on the host: their layers, the target's head, and the
// requests of a step.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/cpu/drafter/recurrent_drafter.h"
#include "backend/cpu/drafter/slot_requests.h"
#include "backend/cpu/linear/packed_linear.h"
#include "bind/decoder_object.h"
#include "bind/op_call.h"
#include "bind/slots_argument.h"

namespace specdec {

// TypeError unless it is a PackedLinear: None must not become a null pointer.
const cpu::PackedLinear* layer_argument(pybind11::handle layer, const std::string& name);
// TypeError unless it is a LlamaDecoder.
DecoderObject& target_argument(const pybind11::object& target);

// scores [rows, num_scores] of x [rows, size] by the target's head, whose sizes are checked. The
// caller keeps the target.
std::function<void(const float* x, std::int64_t rows, float* scores)> target_scores(
    DecoderObject& target, std::int64_t size, std::int64_t num_scores);

// token_ids int32 [num_scores] within the vocabulary; None: empty.
std::vector<TokenId> token_ids_argument(const pybind11::object& token_ids, std::int64_t num_scores);

// ReDrafter's network and the Python objects that its layers live in.
struct RecurrentDrafterObject {
  std::vector<pybind11::object> kept;
  std::unique_ptr<cpu::RecurrentDrafter> network;
};

// slots, slot_ids [B], max_drafts [B] and hidden [num_slots, hidden_size] of a step.
class SlotRequestsArgument {
 public:
  SlotRequestsArgument(const char* operation, const SlotLayout& layout, pybind11::handle slots,
                       pybind11::handle slot_ids, pybind11::handle max_drafts,
                       pybind11::handle hidden, std::int64_t hidden_size);
  const cpu::SlotRequests& view() const { return view_; }

 private:
  CallOptions where_;
  OpCall call_;
  SlotsArgument slots_;
  std::int64_t requests_ = 0;
  BorrowedTensor slot_ids_, max_drafts_, hidden_;
  cpu::SlotRequests view_;
};

}  // namespace specdec
