// A weight from Python: a float tensor, or (uint8 tensor [N, bytes of a row], format name).
#pragma once

#include <pybind11/pybind11.h>

#include "backend/cpu/linear/packed_linear.h"
#include "bind/dlpack_convert.h"

namespace specdec {

class WeightArgument {
 public:
  // Raises TypeError for anything else, ValueError for a name that is no block format.
  WeightArgument(pybind11::handle weight, const char* name);

  const cpu::WeightView& view() const { return view_; }

 private:
  BorrowedTensor tensor_;
  cpu::WeightView view_;
};

}  // namespace specdec
