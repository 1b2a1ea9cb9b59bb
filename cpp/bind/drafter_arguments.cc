#include "bind/drafter_arguments.h"

#include "base/check.h"
#include "bind/op_arguments.h"

namespace py = pybind11;

namespace specdec {

const cpu::PackedLinear* layer_argument(py::handle layer, const std::string& name) {
  if (!py::isinstance<cpu::PackedLinear>(layer)) {
    throw py::type_error(
        detail::join(name, " is a ", Py_TYPE(layer.ptr())->tp_name, ": give a PackedLinear"));
  }
  return layer.cast<const cpu::PackedLinear*>();
}

DecoderObject& target_argument(const py::object& target) {
  if (!py::isinstance<DecoderObject>(target)) {
    throw py::type_error(detail::join("target is a ", Py_TYPE(target.ptr())->tp_name,
                                      ": give the target's LlamaDecoder"));
  }
  return target.cast<DecoderObject&>();
}

std::function<void(const float*, std::int64_t, float*)> target_scores(DecoderObject& target,
                                                                      std::int64_t size,
                                                                      std::int64_t num_scores) {
  auto* decoder = &target.decoder;
  const cpu::DecoderConfig& config = decoder->config();
  SPECDEC_REQUIRE(config.hidden_size == size && config.head_size == num_scores,
                  "target: the decoder's head scores ", config.head_size, " tokens of ",
                  config.hidden_size, " values, expected num_scores = ", num_scores, " of ", size);
  return [decoder](const float* x, std::int64_t rows, float* scores) {
    decoder->score_rows(x, rows, scores);
  };
}

std::vector<TokenId> token_ids_argument(const py::object& token_ids, std::int64_t num_scores) {
  if (token_ids.is_none()) return {};
  const BorrowedTensor ids(token_ids, "token_ids");
  check_cpu(ids.view(), "token_ids");
  check_contiguous(ids.view(), "token_ids");
  check_dtype(ids.view(), "token_ids", {DType::kI32});
  check_shape(ids.view(), "token_ids", "[V]", {num_scores});
  const auto* first = static_cast<const TokenId*>(ids->data);
  return {first, first + num_scores};
}

SlotRequestsArgument::SlotRequestsArgument(const char* operation, const SlotLayout& layout,
                                           py::handle slots, py::handle slot_ids,
                                           py::handle max_drafts, py::handle hidden,
                                           std::int64_t hidden_size)
    : where_{py::str("cpu"), 0, py::none(), py::none()},
      call_(operation, where_),
      slots_(call_, layout, slots),
      slot_ids_(slot_ids_argument(call_, slot_ids, slots_.view(), &requests_)),
      max_drafts_(vector_argument(call_, max_drafts, "max_drafts", DType::kI32, "[B]", requests_)),
      hidden_(tensor_argument(call_, hidden, "hidden", "[num_slots, hidden_size]", DType::kF32,
                              {slots_.view().count, hidden_size}, false)) {
  view_.slots = slots_.view();
  view_.slot_ids = static_cast<const std::int32_t*>(slot_ids_->data);
  view_.max_drafts = static_cast<const std::int32_t*>(max_drafts_->data);
  view_.num_requests = static_cast<std::int32_t>(requests_);
  view_.hidden = static_cast<const float*>(hidden_->data);
  view_.hidden_size = hidden_size;
}

}  // namespace specdec
