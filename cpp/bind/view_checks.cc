#include "bind/view_checks.h"

#include <pybind11/pybind11.h>

#include <bit>
#include <cstddef>
#include <sstream>
#include <utility>

#include "base/check.h"
#include "base/types.h"

namespace py = pybind11;

namespace specdec {

using detail::join;

std::string shape_text(const TensorView& view) {
  std::ostringstream text;
  text << '[';
  for (int i = 0; i < view.ndim; ++i) text << (i ? ", " : "") << view.shape[i];
  text << ']';
  return text.str();
}

void check_shape(const TensorView& view, const char* name, const char* what,
                 std::initializer_list<std::int64_t> expected) {
  bool equal = view.ndim == static_cast<int>(expected.size());
  int axis = 0;
  for (const std::int64_t size : expected) {
    if (!equal) break;
    equal = size == kAny || view.shape[axis] == size;
    ++axis;
  }
  if (equal) return;
  std::ostringstream text;
  text << name << " has shape " << shape_text(view) << ": expected " << what << " = [";
  axis = 0;
  for (const std::int64_t size : expected) {
    text << (axis++ ? ", " : "");
    if (size == kAny) {
      text << "any";
    } else {
      text << size;
    }
  }
  text << ']';
  throw py::value_error(text.str());
}

void check_dtype(const TensorView& view, const char* name, std::initializer_list<DType> allowed) {
  for (const DType dtype : allowed) {
    if (view.dtype == dtype) return;
  }
  std::ostringstream text;
  text << name << " has dtype " << dtype_name(view.dtype) << ": expected ";
  bool first = true;
  for (const DType dtype : allowed) {
    text << (first ? "" : " or ") << dtype_name(dtype);
    first = false;
  }
  throw py::type_error(text.str());
}

void check_cpu(const TensorView& view, const char* name) {
  if (view.device == DeviceType::kCpu) return;
  throw py::value_error(join(name, " is on cuda:", view.device_index,
                             ": this operation runs on the CPU, move it with ", name, ".cpu()"));
}

void check_last_axis_contiguous(const TensorView& view, const char* name) {
  const int last = view.ndim - 1;
  if (last < 0 || view.shape[last] <= 1 || view.strides[last] == 1) return;
  throw py::value_error(join(name, " has stride ", view.strides[last],
                             " on its last axis: that axis has to be contiguous (stride 1)"));
}

void check_contiguous(const TensorView& view, const char* name) {
  if (view.is_contiguous()) return;
  throw py::value_error(join(name, " is not contiguous: use ", name, ".contiguous()"));
}

void check_rows_apart(const TensorView& view, const char* name) {
  const std::int64_t stride = view.strides[0], apart = stride < 0 ? -stride : stride;
  SPECDEC_REQUIRE(view.shape[0] <= 1 || apart >= view.shape[1], name, " has rows of ",
                  view.shape[1], " elements, ", apart,
                  " apart: rows that are written must not overlap");
}

namespace {

// First and last byte of a view.
std::pair<const std::byte*, const std::byte*> span_of(const TensorView& view) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(view.dtype));
  std::int64_t low = 0, high = 0;
  for (int axis = 0; axis < view.ndim; ++axis) {
    const std::int64_t reach = (view.shape[axis] - 1) * view.strides[axis];
    (reach < 0 ? low : high) += reach;
  }
  const auto* base = static_cast<const std::byte*>(view.data);
  return {base + low * bytes, base + (high + 1) * bytes};
}

}  // namespace

void check_disjoint(const TensorView& out, const char* name, const TensorView& in,
                    const char* in_name) {
  if (out.numel() == 0 || in.numel() == 0) return;
  const auto [begin, end] = span_of(out);
  const auto [in_begin, in_end] = span_of(in);
  SPECDEC_REQUIRE(end <= in_begin || in_end <= begin, name, " lies within the memory of ", in_name,
                  ", which is read while it is written: give one of its own");
}

int check_mask_row(const std::uint32_t* words, int row, std::int64_t request) {
  SPECDEC_REQUIRE((words[row >> 5] >> (row & 31)) & 1u, "mask row ", row, " of request ", request,
                  " lacks its own bit: a row sees itself");
  bool later = row % 32 != 31 && (words[row >> 5] >> ((row & 31) + 1)) != 0;
  for (int w = (row >> 5) + 1; w < kMaskWords; ++w) later = later || words[w] != 0;
  SPECDEC_REQUIRE(!later, "mask row ", row, " of request ", request,
                  " has a bit of a later row: ancestors come before their descendants");
  int ancestors = -1;
  for (int w = 0; w < kMaskWords; ++w) ancestors += std::popcount(words[w]);
  return ancestors;
}

}  // namespace specdec
