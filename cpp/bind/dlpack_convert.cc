#include "bind/dlpack_convert.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/check.h"
#include "bind/dlpack_abi.h"

namespace py = pybind11;

namespace specdec {
namespace {

using detail::join;

// Elements of a view, and its reach along one axis: sums of them, in bytes, fit into 64 bits.
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 56;

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
        if (type.bits == 8) return DType::kI8;
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
                            ": supported are float32, float16, bfloat16, float8_e4m3fn, int8, "
                            "int32, int64, uint8, uint32 and bool"));
}

// ValueError unless the view's elements lie where its type may be read, at offsets that fit into 64
// bits. Whoever exports a tensor vouches for its memory, but strides can be made of anything.
void check_layout(const TensorView& view, const char* name) {
  std::int64_t numel = 1;
  bool fits = true, empty = false;
  for (int i = 0; i < view.ndim && fits; ++i) {
    const std::int64_t size = view.shape[i];
    std::int64_t reach = 0;
    empty = empty || size == 0;
    fits = size >= 0 && (size == 0 || (!__builtin_mul_overflow(numel, size, &numel) &&
                                       !__builtin_mul_overflow(size - 1, view.strides[i], &reach) &&
                                       reach > -kMaxExtent && reach < kMaxExtent));
  }
  if (!fits || numel > kMaxExtent) {
    throw py::value_error(
        join(name, " has shape ", shape_text(view), " and strides that reach beyond any memory"));
  }
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  if (!empty && (address == 0 || address % dtype_bytes(view.dtype) != 0)) {
    throw py::value_error(join(name, " begins at address ", address, ": ", dtype_name(view.dtype),
                               " elements lie at multiples of ", dtype_bytes(view.dtype),
                               " bytes, copy the tensor (", name, ".clone())"));
  }
}

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kI32,    DType::kI64,
                             DType::kU8,  DType::kU32, DType::kBool, DType::kF8E4M3, DType::kI8};

dlpack::DataType from_dtype(DType dtype) {
  const auto bits = static_cast<std::uint8_t>(8 * dtype_bytes(dtype));
  switch (dtype) {
    case DType::kF32:
    case DType::kF16:
      return {dlpack::kFloat, bits, 1};
    case DType::kBF16:
      return {dlpack::kBfloat, bits, 1};
    case DType::kI8:
    case DType::kI32:
    case DType::kI64:
      return {dlpack::kInt, bits, 1};
    case DType::kU8:
    case DType::kU32:
      return {dlpack::kUInt, bits, 1};
    case DType::kBool:
      return {dlpack::kBool, bits, 1};
    case DType::kF8E4M3:
      return {dlpack::kFloat8E4M3FN, bits, 1};
  }
  throw std::logic_error("a dtype without a DLPack type");
}

TensorView borrowed_view(const dlpack::Tensor& tensor, const char* name) {
  if (tensor.ndim < 0 || tensor.ndim > TensorView::kMaxDims) {
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
  view.data = tensor.data;
  if (view.data != nullptr) view.data = static_cast<char*>(view.data) + tensor.byte_offset;
  view.ndim = tensor.ndim;
  std::int64_t expected = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    view.shape[i] = tensor.shape[i];
    view.strides[i] = tensor.strides != nullptr ? tensor.strides[i] : expected;
    (void)__builtin_mul_overflow(expected, tensor.shape[i], &expected);  // check_layout sees it
  }
  check_layout(view, name);
  return view;
}

// A NumPy array without the detour through a capsule: this is on the path of every step.
TensorView array_view(const py::array& array, const char* name, bool writable) {
  constexpr std::uint8_t kComplex = 5, kForeign = 0xff;
  const py::dtype type = array.dtype();
  std::uint8_t code = kForeign;
  switch (type.kind()) {
    case 'f':
      code = dlpack::kFloat;
      break;
    case 'i':
      code = dlpack::kInt;
      break;
    case 'u':
      code = dlpack::kUInt;
      break;
    case 'b':
      code = dlpack::kBool;
      break;
    case 'c':
      code = kComplex;
      break;
    default:
      break;
  }
  const auto item = static_cast<std::int64_t>(array.itemsize());
  if (code == kForeign || type.byteorder() == '>' || item > 31) {
    throw py::type_error(join(name, " cannot be exported through DLPack: its dtype is ",
                              py::str(type).cast<std::string>()));
  }
  if (writable && !array.writeable()) {
    throw py::value_error(join(name, " is read-only: it is written to, give a writable tensor"));
  }
  if (array.ndim() > TensorView::kMaxDims) {
    throw py::value_error(join(name, " has ", array.ndim(), " axes: at most ", TensorView::kMaxDims,
                               " are supported"));
  }
  TensorView view;
  view.dtype = to_dtype({code, static_cast<std::uint8_t>(8 * item), 1}, name);
  view.device = DeviceType::kCpu;
  view.data = const_cast<void*>(array.data());
  view.ndim = static_cast<int>(array.ndim());
  for (int i = 0; i < view.ndim; ++i) {
    view.shape[i] = array.shape(i);
    const auto stride = static_cast<std::int64_t>(array.strides(i));
    if (stride % item != 0) {
      throw py::type_error(join(name, " cannot be exported through DLPack: a stride of ", stride,
                                " bytes is no multiple of its elements' ", item));
    }
    view.strides[i] = stride / item;
  }
  // NumPy says 0 for every stride of an array without elements, which would count as a column.
  for (int i = view.ndim - 1, step = 1; array.size() == 0 && i >= 0; --i) {
    view.strides[i] = step;
    step *= static_cast<int>(std::max<std::int64_t>(view.shape[i], 1));
  }
  check_layout(view, name);
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

// What a producer is asked for besides its tensor. On a CUDA device: no synchronisation (-1), as
// the caller orders its work by itself. Without it a producer may wait for the default stream,
// which ends a graph's capture. Producers on the CPU know no streams.
py::dict export_options(py::handle tensor) {
  py::dict options;
  if (!py::hasattr(tensor, "__dlpack_device__")) return options;
  const auto device = py::tuple(tensor.attr("__dlpack_device__")());
  const auto type = device[0].cast<std::int32_t>();
  if (type == dlpack::kCuda || type == dlpack::kCudaManaged) options["stream"] = -1;
  return options;
}

// Calls tensor.__dlpack__(), with the versioned capsule when the producer knows it.
py::object export_capsule(py::handle tensor, const char* name) {
  if (!py::hasattr(tensor, "__dlpack__")) {
    throw py::type_error(join(name, " is a ", type_name(tensor),
                              ": give a tensor (torch.Tensor, or anything with __dlpack__)"));
  }
  const py::object method = tensor.attr("__dlpack__");
  const py::dict options = export_options(tensor);
  try {
    return method(py::arg("max_version") = py::make_tuple(1, 0), **options);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) {
      throw py::type_error(join(name, " cannot be exported through DLPack: ", error.what()));
    }
  }
  try {
    return method(**options);
  } catch (py::error_already_set& error) {
    throw py::type_error(join(name, " cannot be exported through DLPack: ", error.what()));
  }
}

}  // namespace

BorrowedTensor::BorrowedTensor(py::handle tensor, const char* name, bool writable) {
  if (py::isinstance<py::array>(tensor)) {
    owner_ = py::reinterpret_borrow<py::object>(tensor);
    view_ = array_view(py::reinterpret_borrow<py::array>(tensor), name, writable);
    return;
  }
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

py::capsule export_tensor(void* data, DType dtype, const std::vector<std::int64_t>& shape,
                          std::shared_ptr<const void> owner) {
  struct Export {
    std::vector<std::int64_t> shape, strides;
    std::shared_ptr<const void> owner;
    dlpack::ManagedTensor managed;
  };
  auto made = std::make_unique<Export>();
  made->shape = shape;
  made->strides.assign(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;) {
    made->strides[i - 1] = made->strides[i] * std::max<std::int64_t>(shape[i], 1);
  }
  made->owner = std::move(owner);
  made->managed = {{data,
                    {dlpack::kCpu, 0},
                    static_cast<std::int32_t>(shape.size()),
                    from_dtype(dtype),
                    made->shape.data(),
                    made->strides.data(),
                    0},
                   made.get(),
                   [](dlpack::ManagedTensor* self) { delete static_cast<Export*>(self->manager); }};
  // A consumer renames the capsule and calls the deleter itself; else the capsule does.
  PyObject* capsule = PyCapsule_New(&made->managed, "dltensor", [](PyObject* object) {
    if (!PyCapsule_IsValid(object, "dltensor")) return;
    auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(object, "dltensor"));
    managed->deleter(managed);
  });
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(made.release());
  return py::reinterpret_steal<py::capsule>(capsule);
}

DType dtype_named(const std::string& name) {
  for (const DType dtype : kDTypes) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw py::value_error(join("dtype '", name,
                             "' is not one of float32, float16, bfloat16, "
                             "float8_e4m3fn, int8, int32, int64, uint8, uint32 and bool"));
}

}  // namespace specdec
