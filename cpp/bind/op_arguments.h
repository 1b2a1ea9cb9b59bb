// Checked conversion of the arguments that the operations on paged K/V share. Everything the core
// later trusts is checked here, once: shapes, dtypes and layout always; the values of lengths, page
// ids and masks where the backend's memory is the host's (OpCall::reads_values).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "backend/step_view.h"
#include "bind/dlpack_convert.h"
#include "bind/op_call.h"

namespace specdec {

// k_pages and v_pages as one view: [P, G, S, K] (one layer) or [layers, P, G, S, K].
class PagesArgument {
 public:
  // `has_layers`: five axes are required, else four.
  PagesArgument(OpCall& call, pybind11::handle k_pages, pybind11::handle v_pages, bool has_layers,
                bool writable);
  const KvCacheView& view() const { return view_; }

 private:
  BorrowedTensor k_, v_;
  KvCacheView view_;
};

// k_scale and v_scale of e4m3 pages: [1] or [G], both alike; None: 1.
class ScalesArgument {
 public:
  ScalesArgument(OpCall& call, pybind11::handle k_scale, pybind11::handle v_scale,
                 const KvCacheView& cache);
  const float* k() const { return static_cast<const float*>(k_.view().data); }
  const float* v() const { return static_cast<const float*>(v_.view().data); }
  std::int32_t stride() const { return stride_; }

 private:
  BorrowedTensor k_, v_;
  std::int32_t stride_ = 0;
};

// What Python gives as the geometry of a step.
struct StepTensors {
  pybind11::handle page_table, kv_len, cu_rows;
  pybind11::handle mask;  // None: rows are causal chains
  // [B]. None: every request is a tree if there is a mask; not known on a device.
  pybind11::handle is_tree;
  // Bounds that size grids and scratch where lengths cannot be read; None: the largest possible.
  pybind11::handle max_rows, max_kv_len;
};

// page_table, kv_len, cu_rows and, optionally, mask: the geometry of a step of causal or tree rows.
class StepArgument {
 public:
  // `num_rows`: rows of the caller's packed tensors; checked against cu_rows where that is
  // readable. `max_depth`: no node of a tree lies deeper.
  StepArgument(OpCall& call, const StepTensors& tensors, const KvCacheView& cache,
               std::int64_t num_rows, int max_depth);
  const StepView& view() const { return view_; }

 private:
  void read_mask(int max_depth);
  void take_mask();
  void take_bounds(const StepTensors& tensors, const KvCacheView& cache, bool readable);

  BorrowedTensor page_table_, kv_len_, cu_rows_, mask_, is_tree_tensor_;
  std::vector<std::uint32_t> mask_words_;  // when the caller's rows are shorter than kMaskWords
  std::vector<std::uint8_t> is_tree_;
  StepView view_;
};

// A packed tensor of rows [R, heads, K]: head dim contiguous, heads K apart, rows anywhere.
class RowsArgument {
 public:
  RowsArgument(OpCall& call, pybind11::handle tensor, const char* name, std::int64_t rows,
               std::int64_t heads, std::int64_t head_dim, bool writable = false);
  const TensorView& view() const { return tensor_.view(); }
  std::int64_t row_stride() const { return tensor_.view().strides[0]; }

 private:
  BorrowedTensor tensor_;
};

// TypeError unless it is an integer.
std::int64_t int_argument(pybind11::handle value, const char* name);

// A contiguous vector; `what` names its axis in error texts, e.g. "[B]".
BorrowedTensor vector_argument(OpCall& call, pybind11::handle tensor, const char* name, DType dtype,
                               const char* what, std::int64_t size, bool writable = false);

// A contiguous tensor of this shape; `what` names its axes in error texts, e.g. "[B, 128]".
BorrowedTensor tensor_argument(OpCall& call, pybind11::handle tensor, const char* name,
                               const char* what, DType dtype,
                               std::initializer_list<std::int64_t> shape, bool writable = false);

}  // namespace specdec
