// A borrowed, strided view of somebody else's memory. The core knows no tensor library: the binding
// fills this from DLPack. Strides are in elements.
#pragma once

#include <array>
#include <cstdint>

#include "base/types.h"

namespace specdec {

struct TensorView {
  static constexpr int kMaxDims = 6;

  void* data = nullptr;
  int ndim = 0;
  std::array<std::int64_t, kMaxDims> shape{};
  std::array<std::int64_t, kMaxDims> strides{};
  DType dtype = DType::kF32;
  DeviceType device = DeviceType::kCpu;
  int device_index = 0;

  bool defined() const { return data != nullptr; }
  bool is_contiguous() const {
    std::int64_t expected = 1;
    bool contiguous = true;
    for (int i = ndim - 1; i >= 0; --i) {
      if (shape[i] == 0) return true;  // no element, whatever the strides
      contiguous = contiguous && (shape[i] == 1 || strides[i] == expected);
      expected *= shape[i];
    }
    return contiguous;
  }
  std::int64_t numel() const {
    std::int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }
  // Elements from `data` to the lowest one and past the highest one; a stride may be negative.
  struct Span {
    std::int64_t begin = 0, end = 0;
  };
  Span span() const {
    Span span;
    for (int i = 0; i < ndim; ++i) {
      if (shape[i] == 0) return {};
      const std::int64_t reach = (shape[i] - 1) * strides[i];
      (reach < 0 ? span.begin : span.end) += reach;
    }
    ++span.end;
    return span;
  }
};

}  // namespace specdec
