// Host memory of tensors whose zeros cost nothing until they are written (base/zeroed_memory.h).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/zeroed_memory.h"
#include "bind/dlpack_convert.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

// A contiguous tensor of zeros. What is exported shares the memory and keeps it, whether or not
// this object lives.
class LazyZeros {
 public:
  LazyZeros(std::vector<std::int64_t> shape, const std::string& dtype)
      : shape_(std::move(shape)), dtype_(dtype_named(dtype)) {
    auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype_));
    for (const std::int64_t size : shape_) {
      SPECDEC_REQUIRE(size >= 0, "LazyZeros: shape has an axis of ", size, ": not negative");
      SPECDEC_REQUIRE(size == 0 || bytes <= std::numeric_limits<std::int64_t>::max() / size,
                      "LazyZeros: a tensor of more than 2^63 bytes");
      bytes *= size;
    }
    memory_ = std::make_shared<ZeroedMemory>(static_cast<std::size_t>(bytes));
  }

  py::capsule exported() const {
    return export_tensor(memory_->data(), dtype_, shape_, std::shared_ptr<const void>(memory_));
  }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  std::string dtype() const { return dtype_name(dtype_); }
  void release() { memory_->release(); }
  // [:, :count] is written, so that it is memory of its own from now on.
  void write_zeros(std::int64_t count) {
    SPECDEC_REQUIRE(shape_.size() >= 2 && count >= 0 && count <= shape_[1], "count = ", count,
                    ": the second axis has ", shape_.size() >= 2 ? shape_[1] : 0);
    if (num_bytes() == 0) return;
    const std::int64_t outer = num_bytes() / shape_[0], inner = outer / shape_[1];
    for (std::int64_t i = 0; i < shape_[0]; ++i) {
      std::memset(memory_->data() + i * outer, 0, static_cast<std::size_t>(count * inner));
    }
  }
  std::int64_t resident_bytes() const {
    return static_cast<std::int64_t>(memory_->resident_bytes());
  }
  std::int64_t num_bytes() const { return static_cast<std::int64_t>(memory_->bytes()); }

 private:
  std::vector<std::int64_t> shape_;
  DType dtype_;
  std::shared_ptr<ZeroedMemory> memory_;
};

}  // namespace

void register_memory(py::module_& m) {
  py::class_<LazyZeros>(m, "LazyZeros",
                        "A tensor of zeros on the host whose memory is taken when it is first "
                        "written. torch.from_dlpack() gives a view of it, which keeps it alive.")
      .def(py::init<std::vector<std::int64_t>, const std::string&>(), py::arg("shape"),
           py::arg("dtype"), "dtype: as torch names it, such as \"bfloat16\".")
      .def(
          "__dlpack__",
          [](const LazyZeros& self, const py::object&, const py::object&, const py::object&,
             const py::object&) { return self.exported(); },
          py::kw_only(), py::arg("stream") = py::none(), py::arg("max_version") = py::none(),
          py::arg("dl_device") = py::none(), py::arg("copy") = py::none(),
          "What a consumer may ask for besides is ignored: it gets this memory, on the host.")
      .def("__dlpack_device__", [](const LazyZeros&) { return py::make_tuple(1, 0); })
      .def(
          "write_zeros", &LazyZeros::write_zeros, py::arg("count"),
          "Write zeros into [:, :count]: memory that was never written is one page to the machine. "
          "Raises ValueError.")
      .def("release", &LazyZeros::release,
           "Give the memory back to the operating system: every element is zero again. Nothing "
           "may use the tensor meanwhile.")
      .def_property_readonly("num_bytes", &LazyZeros::num_bytes)
      .def_property_readonly("resident_bytes", &LazyZeros::resident_bytes,
                             "Bytes that take memory now.")
      .def_property_readonly(
          "shape", [](const LazyZeros& self) { return py::tuple(py::cast(self.shape())); })
      .def_property_readonly("dtype", &LazyZeros::dtype, "Its name, such as \"bfloat16\".");
}

}  // namespace specdec
