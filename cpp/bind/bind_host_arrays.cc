// What NumPy lacks for arrays of floats on the host: bfloat16, and passes over many values.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "backend/cpu/host_arrays.h"
#include "base/check.h"
#include "bind/dlpack_convert.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

// The memory of a NumPy array of bits. What is exported keeps the array.
class Bfloat16Array {
 public:
  explicit Bfloat16Array(const py::array& bits) {
    if (!py::dtype::of<std::uint16_t>().is(bits.dtype())) {
      throw py::type_error("bits has dtype " + py::str(bits.dtype()).cast<std::string>() +
                           ": expected uint16");
    }
    bits_ = py::reinterpret_borrow<py::array_t<std::uint16_t>>(bits);
    if ((bits_.flags() & py::array::c_style) == 0) {
      throw py::value_error("bits is not contiguous: use np.ascontiguousarray(bits)");
    }
  }

  const py::array_t<std::uint16_t>& bits() const { return bits_; }
  py::tuple shape() const { return bits_.attr("shape"); }

  py::capsule exported() const {
    // Whoever drops the last view may not hold the GIL.
    const std::shared_ptr<const void> owner(new py::object(bits_), [](py::object* array) {
      const py::gil_scoped_acquire gil;
      delete array;
    });
    const std::vector<std::int64_t> shape(bits_.shape(), bits_.shape() + bits_.ndim());
    return export_tensor(const_cast<std::uint16_t*>(bits_.data()), DType::kBF16, shape, owner);
  }

 private:
  py::array_t<std::uint16_t> bits_;
};

void check_floats(const BorrowedTensor& tensor, const char* name) {
  check_cpu(tensor.view(), name);
  check_contiguous(tensor.view(), name);
  check_dtype(tensor.view(), name, {DType::kF32, DType::kBF16, DType::kF16});
}

void convert_floats(const py::object& values, const py::object& out) {
  const BorrowedTensor from(values, "values"), to(out, "out", true);
  check_floats(from, "values");
  check_floats(to, "out");
  if (from->numel() != to->numel()) {
    throw py::value_error("values and out differ in their number of elements");
  }
  const py::gil_scoped_release release;
  cpu::convert_floats(from->data, from->dtype, to->data, to->dtype, from->numel());
}

std::int64_t count_not_finite(const py::object& values) {
  const BorrowedTensor tensor(values, "values");
  check_floats(tensor, "values");
  const py::gil_scoped_release release;
  return cpu::count_not_finite(tensor->data, tensor->dtype, tensor->numel());
}

}  // namespace

void register_host_arrays(py::module_& m) {
  py::class_<Bfloat16Array>(
      m, "Bfloat16Array",
      "A contiguous NumPy array of uint16 as a tensor of bfloat16, which NumPy does not have. "
      "Takes the place of a tensor in every call; torch.from_dlpack() gives a view of it.")
      .def(py::init<const py::array&>(), py::arg("bits"))
      .def_property_readonly("bits", &Bfloat16Array::bits, "The array, not a copy.")
      .def_property_readonly("shape", &Bfloat16Array::shape)
      .def(
          "__dlpack__",
          [](const Bfloat16Array& self, const py::object&, const py::object&, const py::object&,
             const py::object&) { return self.exported(); },
          py::kw_only(), py::arg("stream") = py::none(), py::arg("max_version") = py::none(),
          py::arg("dl_device") = py::none(), py::arg("copy") = py::none(),
          "What a consumer may ask for besides is ignored: it gets this memory, on the host.")
      .def("__dlpack_device__", [](const Bfloat16Array&) { return py::make_tuple(1, 0); });
  m.def("convert_floats", &convert_floats, py::arg("values"), py::arg("out"),
        "Write ``values`` into ``out``: as many elements, both contiguous tensors of float32, "
        "bfloat16 or float16 on the CPU. Rounds to the nearest, ties to even.");
  m.def("count_not_finite", &count_not_finite, py::arg("values"),
        "How many of the values are NaN or infinite: a contiguous tensor of float32, bfloat16 or "
        "float16 on the CPU.");
}

}  // namespace specdec
