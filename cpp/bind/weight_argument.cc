#include "bind/weight_argument.h"

#include <string>

#include "base/check.h"

namespace py = pybind11;

namespace specdec {
namespace {

bool is_pair(py::handle weight) { return py::isinstance<py::tuple>(weight); }

py::object tensor_of(py::handle weight, const char* name) {
  if (!is_pair(weight)) return py::reinterpret_borrow<py::object>(weight);
  const auto pair = py::reinterpret_borrow<py::tuple>(weight);
  if (pair.size() != 2 || !py::isinstance<py::str>(pair[1])) {
    throw py::type_error(
        detail::join(name, ": give a float tensor, or a uint8 tensor and the name of its format"));
  }
  return pair[0];
}

cpu::WeightView view_of(py::handle weight, const BorrowedTensor& tensor, const char* name) {
  check_cpu(tensor.view(), name);
  if (!is_pair(weight)) {
    check_dtype(tensor.view(), name, {DType::kF32, DType::kBF16, DType::kF16});
    return tensor.view();
  }
  check_dtype(tensor.view(), name, {DType::kU8});
  const auto format = py::reinterpret_borrow<py::tuple>(weight)[1].cast<std::string>();
  return {tensor.view(), cpu::block_format_named(format)};
}

}  // namespace

WeightArgument::WeightArgument(py::handle weight, const char* name)
    : tensor_(tensor_of(weight, name), name), view_(view_of(weight, tensor_, name)) {}

}  // namespace specdec
