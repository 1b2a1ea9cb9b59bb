// Checks of an argument that is a tensor. All name the argument, what it is and what it has to be.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "base/tensor_view.h"

namespace specdec {

// As messages show it: "[2, 3]".
std::string shape_text(const TensorView& view);

// One axis of an expected shape: an exact size, or kAny.
inline constexpr std::int64_t kAny = -1;
// `what` are the axis letters, e.g. "[R, H, K]"; ValueError.
void check_shape(const TensorView& view, const char* name, const char* what,
                 std::initializer_list<std::int64_t> expected);
// TypeError unless the dtype is one of `allowed`.
void check_dtype(const TensorView& view, const char* name, std::initializer_list<DType> allowed);
// ValueError unless the tensor lies on the CPU.
void check_cpu(const TensorView& view, const char* name);
// ValueError unless the last axis has stride 1 (or at most one element).
void check_last_axis_contiguous(const TensorView& view, const char* name);
void check_contiguous(const TensorView& view, const char* name);
// ValueError where rows [R, N] that are written lie in each other's memory.
void check_rows_apart(const TensorView& view, const char* name);
// ValueError where `out`, which is written while `in` is read, shares memory with it.
void check_disjoint(const TensorView& out, const char* name, const TensorView& in,
                    const char* in_name);
// ValueError unless row `row` of a request's tree sees itself and nothing after it. words:
// kMaskWords of it. Returns how many ancestors it has.
int check_mask_row(const std::uint32_t* words, int row, std::int64_t request);

}  // namespace specdec
