// Arrays of texts in a GGUF file: each is its length, a little-endian uint64, and its bytes. A
// vocabulary and its merges are a hundred thousand of them.
#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/check.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

// The texts of `data`, one after the other from `at` on.
class TextArray {
 public:
  TextArray(const py::buffer& data, std::int64_t at) : info_(data.request()), at_(at) {
    SPECDEC_REQUIRE(info_.itemsize == 1 && info_.ndim == 1, "text_array: data must be bytes");
    SPECDEC_REQUIRE(at >= 0 && at <= info_.size, "text_array: at = ", at, ", the data has ",
                    info_.size, " bytes");
  }

  std::string_view next() {
    std::uint64_t length = 0;
    const std::int64_t left = info_.size - at_ - std::int64_t{sizeof(length)};
    const char* begin = static_cast<const char*>(info_.ptr) + at_;
    if (left >= 0) std::memcpy(&length, begin, sizeof(length));
    SPECDEC_REQUIRE(left >= 0 && length <= static_cast<std::uint64_t>(left),
                    "the file ends within it");
    at_ += static_cast<std::int64_t>(sizeof(length) + length);
    return {begin + sizeof(length), length};
  }

  std::int64_t at() const { return at_; }

 private:
  py::buffer_info info_;
  std::int64_t at_;
};

std::int64_t text_array_end(const py::buffer& data, std::int64_t at, std::int64_t count) {
  TextArray texts(data, at);
  for (std::int64_t i = 0; i < count; ++i) texts.next();
  return texts.at();
}

py::typing::List<py::str> text_array(const py::buffer& data, std::int64_t at, std::int64_t count) {
  TextArray texts(data, at);
  py::list result;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::string_view text = texts.next();
    PyObject* decoded =
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
    if (decoded == nullptr) throw py::error_already_set();
    result.append(py::reinterpret_steal<py::str>(decoded));
  }
  return result;
}

}  // namespace

void register_text_array(py::module_& m) {
  m.def("text_array", &text_array, py::arg("data"), py::arg("at"), py::arg("count"),
        "`count` texts of a GGUF array that begins at byte `at` of `data`. ValueError: the data "
        "ends before; UnicodeDecodeError: one is not UTF-8.");
  m.def("text_array_end", &text_array_end, py::arg("data"), py::arg("at"), py::arg("count"),
        "Where they end, without reading them.");
}

}  // namespace specdec
