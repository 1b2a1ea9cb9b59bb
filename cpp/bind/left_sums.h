// A product that ops.linear left in pieces, on its way to the operation that reads it.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "backend/linear_sums.h"
#include "base/check.h"
#include "base/tensor_view.h"
#include "bind/op_call.h"

namespace specdec {

struct LeftSums {
  LinearSums sums;
  std::int32_t rows = 0, columns = 0;
  DType dtype = DType::kF32;  // that the result is rounded to
  const Backend* backend = nullptr;
  std::vector<TensorView> memory;      // that its reader touches
  std::vector<pybind11::object> keep;  // owns it

  // The sums for an operation whose own tensor they stand for.
  LinearSums use(OpCall& call, std::int64_t wanted_rows, std::int64_t wanted_columns,
                 DType wanted_dtype) const {
    SPECDEC_REQUIRE(&call.backend() == backend, "sums are of backend \"", backend->name,
                    "\", the call of \"", call.backend().name, "\": use one for both");
    SPECDEC_REQUIRE(rows == wanted_rows && columns == wanted_columns, "sums has shape [", rows,
                    ", ", columns, "]: expected [", wanted_rows, ", ", wanted_columns, "]");
    SPECDEC_REQUIRE(dtype == wanted_dtype, "sums is of ", dtype_name(dtype), ": the call is of ",
                    dtype_name(wanted_dtype));
    for (const TensorView& view : memory) call.add(view, "sums");
    return sums;
  }
};

// As an argument that may be None.
using SumsArgument = std::optional<LeftSums*>;

}  // namespace specdec
