// The only place that knows DLPack: Python tensors in, TensorView out, or our memory out as one;
// nothing copied.
//
// Accepted: anything with __dlpack__ (torch, NumPy, ...), on any device, dtypes of base/types.h.
// torch >= 2.10 publishes a table of C functions on its tensor type (__dlpack_c_exchange_api__); it
// is 30 times faster than the __dlpack__ method and used when present. That table hands out tensors
// that require gradients, __dlpack__ does not: both are refused here, these operations are for
// inference only.
//
// No stream is synchronised: a caller that has work in flight on a device orders it by itself.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "base/tensor_view.h"
#include "bind/view_checks.h"

namespace specdec {

// A view plus what keeps its memory alive. Movable; needs the GIL to be made and destroyed.
class BorrowedTensor {
 public:
  BorrowedTensor() = default;
  // Raises TypeError if `tensor` is not a tensor, requires gradients or has a foreign dtype;
  // ValueError if it is read-only and `writable` is asked for. `name` is the argument's.
  BorrowedTensor(pybind11::handle tensor, const char* name, bool writable = false);
  BorrowedTensor(BorrowedTensor&& other) noexcept;
  BorrowedTensor& operator=(BorrowedTensor&& other) noexcept;
  BorrowedTensor(const BorrowedTensor&) = delete;
  BorrowedTensor& operator=(const BorrowedTensor&) = delete;
  ~BorrowedTensor();

  const TensorView& view() const { return view_; }
  const TensorView* operator->() const { return &view_; }
  bool defined() const { return owner_ || capsule_; }

 private:
  TensorView view_;
  pybind11::object owner_;    // the Python tensor (exchange table: its memory lives as long as it)
  pybind11::object capsule_;  // what __dlpack__ returned; releases the export when destroyed
};

// Convenience for callers that hold the tensor themselves while the view is in use.
TensorView to_view(pybind11::handle tensor, const char* name, bool writable = false);

// A capsule "dltensor" of contiguous host memory; whoever takes it keeps `owner`.
pybind11::capsule export_tensor(void* data, DType dtype, const std::vector<std::int64_t>& shape,
                                std::shared_ptr<const void> owner);
// As dtype_name() says it; ValueError.
DType dtype_named(const std::string& name);

}  // namespace specdec
