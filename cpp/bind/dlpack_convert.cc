#include "bind/dlpack_convert.h"

#include <sstream>
#include <string>
#include <utility>

#include "base/check.h"
#include "bind/dlpack_abi.h"

namespace py = pybind11;

namespace specdec {
namespace {

using detail::join;

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

DType to_dtype(dlpack::DataType type, const char* name) {
  if (type.lanes == 1) {
    switch (type.code) {
      case dlpack::kFloat:
        if (type.bits == 32) return DType::kF32;
        if (type.bits == 16) return DType::kF16;
        break;
      case dlpack::kBfloat:
        if (type.bits == 16) return DType::kBF16;
        break;
      case dlpack::kInt:
        if (type.bits == 32) return DType::kI32;
        if (type.bits == 64) return DType::kI64;
        break;
      case dlpack::kUInt:
        if (type.bits == 8) return DType::kU8;
        if (type.bits == 32) return DType::kU32;
        break;
      case dlpack::kBool:
        if (type.bits == 8) return DType::kBool;
        break;
      case dlpack::kFloat8E4M3FN:
        if (type.bits == 8) return DType::kF8E4M3;
        break;
    }
  }
  static constexpr const char* kNames[] = {"int", "uint", "float", "opaque", "bfloat", "complex"};
  const std::string code = type.code < 6 ? kNames[type.code] : join("code ", int{type.code}, " ");
  throw py::type_error(join(name, " has dtype ", code, int{type.bits},
                            ": supported are float32, float16, bfloat16, float8_e4m3fn, int32, "
                            "int64, uint8, uint32 and bool"));
}

TensorView borrowed_view(const dlpack::Tensor& tensor, const char* name) {
  if (tensor.ndim > TensorView::kMaxDims) {
    throw py::value_error(join(name, " has ", tensor.ndim, " axes: at most ", TensorView::kMaxDims,
                               " are supported"));
  }
  TensorView view;
  view.dtype = to_dtype(tensor.dtype, name);
  switch (tensor.device.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      view.device = DeviceType::kCpu;
      break;
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      view.device = DeviceType::kCuda;
      view.device_index = tensor.device.id;
      break;
    default:
      throw py::value_error(join(name, " is on a device of DLPack type ", tensor.device.type,
                                 ": supported are the CPU and CUDA devices"));
  }
  view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view.ndim = tensor.ndim;
  std::int64_t expected = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    view.shape[i] = tensor.shape[i];
    view.strides[i] = tensor.strides != nullptr ? tensor.strides[i] : expected;
    expected *= tensor.shape[i];
  }
  return view;
}

void refuse_grad(py::handle tensor, const char* name) {
  static PyObject* attribute = PyUnicode_InternFromString("requires_grad");
  PyObject* value = PyObject_GetAttr(tensor.ptr(), attribute);
  if (value == nullptr) {
    PyErr_Clear();
    return;
  }
  const bool requires_grad = value == Py_True;
  Py_DECREF(value);
  if (requires_grad) {
    throw py::type_error(join(name,
                              " requires gradients: these operations are for inference "
                              "only: detach first (",
                              name, ".detach())"));
  }
}

// The exchange table of the tensor's type, or null.
const dlpack::ExchangeApi* exchange_api(py::handle tensor) {
  static PyObject* attribute = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  PyObject* capsule =
      PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr())), attribute);
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  // The table is static data of the library that made it; the capsule only points there.
  auto* api =
      static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  if (api == nullptr) PyErr_Clear();
  while (api != nullptr && api->version.major > 1) api = api->previous;
  return api != nullptr && api->version.major == 1 ? api : nullptr;
}

// Calls tensor.__dlpack__(), with the versioned capsule when the producer knows it.
py::object export_capsule(py::handle tensor, const char* name) {
  if (!py::hasattr(tensor, "__dlpack__")) {
    throw py::type_error(join(name, " is a ", type_name(tensor),
                              ": give a tensor (torch.Tensor, or anything with __dlpack__)"));
  }
  const py::object method = tensor.attr("__dlpack__");
  try {
    return method(py::arg("max_version") = py::make_tuple(1, 0));
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) {
      throw py::type_error(join(name, " cannot be exported through DLPack: ", error.what()));
    }
  }
  try {
    return method();
  } catch (py::error_already_set& error) {
    throw py::type_error(join(name, " cannot be exported through DLPack: ", error.what()));
  }
}

std::string shape_text(const TensorView& view) {
  std::ostringstream text;
  text << '[';
  for (int i = 0; i < view.ndim; ++i) text << (i ? ", " : "") << view.shape[i];
  text << ']';
  return text.str();
}

}  // namespace

BorrowedTensor::BorrowedTensor(py::handle tensor, const char* name, bool writable) {
  refuse_grad(tensor, name);
  if (const dlpack::ExchangeApi* api = exchange_api(tensor)) {
    dlpack::Tensor borrowed;
    if (api->borrow_from_object(tensor.ptr(), &borrowed) != 0) {
      py::error_already_set error;
      throw py::type_error(join(name, " cannot be exported through DLPack: ", error.what()));
    }
    view_ = borrowed_view(borrowed, name);
    owner_ = py::reinterpret_borrow<py::object>(tensor);
    return;
  }
  capsule_ = export_capsule(tensor, name);
  // The capsule is never renamed "used_...", so its own destructor calls the producer's deleter.
  if (PyCapsule_IsValid(capsule_.ptr(), "dltensor_versioned")) {
    auto* managed = static_cast<dlpack::ManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule_.ptr(), "dltensor_versioned"));
    if (managed->version.major != 1) {
      throw py::type_error(
          join(name, " speaks DLPack ", managed->version.major, ".x: this build reads 1.x"));
    }
    if (writable && (managed->flags & dlpack::kReadOnly) != 0) {
      throw py::value_error(join(name, " is read-only: it is written to, give a writable tensor"));
    }
    view_ = borrowed_view(managed->tensor, name);
  } else if (PyCapsule_IsValid(capsule_.ptr(), "dltensor")) {
    auto* managed =
        static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule_.ptr(), "dltensor"));
    view_ = borrowed_view(managed->tensor, name);
  } else {
    throw py::type_error(
        join(name, ".__dlpack__() of ", type_name(tensor), " did not return a DLPack capsule"));
  }
}

BorrowedTensor::BorrowedTensor(BorrowedTensor&&) noexcept = default;
BorrowedTensor& BorrowedTensor::operator=(BorrowedTensor&&) noexcept = default;
BorrowedTensor::~BorrowedTensor() = default;

TensorView to_view(py::handle tensor, const char* name, bool writable) {
  return BorrowedTensor(tensor, name, writable).view();
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

}  // namespace specdec
