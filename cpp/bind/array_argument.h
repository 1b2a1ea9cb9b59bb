// NumPy arrays as arguments: contiguous, and where their elements may be read; copied otherwise.
#pragma once

#include <pybind11/numpy.h>

namespace specdec {

inline constexpr int kAligned = pybind11::detail::npy_api::NPY_ARRAY_ALIGNED_;

template <typename T>
using ArrayArgument =
    pybind11::array_t<T, pybind11::array::c_style | pybind11::array::forcecast | kAligned>;

}  // namespace specdec
