// The binary interface of DLPack 1.x (https://dmlc.github.io/dlpack), the parts this project reads.
// Included by dlpack_convert.cc only.
#pragma once

#include <cstdint>

namespace specdec::dlpack {

struct Device {
  std::int32_t type;  // kCpu, kCuda, ...
  std::int32_t id;
};
inline constexpr std::int32_t kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13;

struct DataType {
  std::uint8_t code;  // kInt, ...
  std::uint8_t bits;
  std::uint16_t lanes;
};
inline constexpr std::uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6,
                              kFloat8E4M3FN = 10;

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;    // [ndim]
  std::int64_t* strides;  // [ndim] in elements; null before version 1.2: contiguous
  std::uint64_t byte_offset;
};

struct Version {
  std::uint32_t major, minor;
};

// Inside a capsule named "dltensor".
struct ManagedTensor {
  Tensor tensor;
  void* manager;
  void (*deleter)(ManagedTensor*);
};

// Inside a capsule named "dltensor_versioned". Fields up to `flags` are stable for ever.
struct ManagedTensorVersioned {
  Version version;
  void* manager;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};
inline constexpr std::uint64_t kReadOnly = 1;

// Inside the capsule `type(tensor).__dlpack_c_exchange_api__`, named "dlpack_exchange_api". Only
// the borrowing conversion is called here; the other entries are kept for their place.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* allocate;
  void* managed_from_object;
  void* object_from_managed;
  // Fills `out` with a view that lives as long as the object. Non-zero: a Python error is set.
  int (*borrow_from_object)(void* object, Tensor* out);
  void* current_stream;
};

}  // namespace specdec::dlpack
