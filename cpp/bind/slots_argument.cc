#include "bind/slots_argument.h"

#include <vector>

#include "base/check.h"

namespace py = pybind11;

namespace specdec {

SlotsArgument::SlotsArgument(OpCall& call, const SlotLayout& layout, py::handle slots)
    : tensor_(slots, "slots", true) {
  const TensorView& view = tensor_.view();
  check_shape(view, "slots", "[num_slots, slot_bytes]", {kAny, layout.bytes});
  call.add(view, "slots", true);
  check_dtype(view, "slots", {DType::kU8});
  check_contiguous(view, "slots");
  SPECDEC_REQUIRE(reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0,
                  "slots begins at an address that is no multiple of 16");
  SPECDEC_REQUIRE(view.shape[0] <= INT32_MAX, "slots has ", view.shape[0], " rows");
  pool_ = SlotPoolView{static_cast<std::byte*>(view.data), layout.bytes,
                       static_cast<std::int32_t>(view.shape[0])};
}

BorrowedTensor slot_ids_argument(OpCall& call, py::handle slot_ids, const SlotPoolView& pool,
                                 std::int64_t* count) {
  const BorrowedTensor ids(slot_ids, "slot_ids");
  check_shape(ids.view(), "slot_ids", "[B]", {kAny});
  *count = ids->shape[0];
  SPECDEC_REQUIRE(*count <= 65534, "slot_ids has ", *count, " entries: at most 65534");
  BorrowedTensor checked = vector_argument(call, slot_ids, "slot_ids", DType::kI32, "[B]", *count);
  if (!call.reads_values()) return checked;
  const auto* values = static_cast<const std::int32_t*>(checked->data);
  std::vector<bool> taken(static_cast<std::size_t>(pool.count));
  for (std::int64_t b = 0; b < *count; ++b) {
    const std::int32_t id = values[b];
    SPECDEC_REQUIRE(id >= -1 && id < pool.count, "slot_ids[", b, "] = ", id, ": the pool has ",
                    pool.count, " slots; -1 for none");
    if (id < 0) continue;
    SPECDEC_REQUIRE(!taken[id], "slot_ids[", b, "] = ", id, " is given twice");
    taken[id] = true;
  }
  return checked;
}

}  // namespace specdec
