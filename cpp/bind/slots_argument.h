// Arguments of the operations on slots: the pool, and which of its slots a step's requests are.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "algo/slot.h"
#include "backend/slot_ops.h"
#include "bind/op_arguments.h"

namespace specdec {

inline constexpr std::int64_t kResultWords = sizeof(SlotResult) / sizeof(std::int32_t);
static_assert(kResultWords * sizeof(std::int32_t) == sizeof(SlotResult));

// slots [count, bytes] uint8, contiguous.
class SlotsArgument {
 public:
  SlotsArgument(OpCall& call, const SlotLayout& layout, pybind11::handle slots);
  const SlotPoolView& view() const { return pool_; }

 private:
  BorrowedTensor tensor_;
  SlotPoolView pool_;
};

// slot_ids [B] int32. A slot serves one request of a step: two would overwrite each other.
BorrowedTensor slot_ids_argument(OpCall& call, pybind11::handle slot_ids, const SlotPoolView& pool,
                                 std::int64_t* count);

}  // namespace specdec
