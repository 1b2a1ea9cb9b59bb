// Checked conversion of the arguments that the operations on paged K/V share. Everything the core
// later trusts is checked here, once.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "backend/step_view.h"
#include "bind/dlpack_convert.h"

namespace specdec {

// k_pages and v_pages as one view: [P, G, S, K] (one layer) or [layers, P, G, S, K].
class PagesArgument {
 public:
  // `has_layers`: five axes are required, else four.
  PagesArgument(pybind11::handle k_pages, pybind11::handle v_pages, bool has_layers);
  const KvCacheView& view() const { return view_; }

 private:
  BorrowedTensor k_, v_;
  KvCacheView view_;
};

// page_table, kv_len, cu_rows and, optionally, mask: the geometry of a step of causal or tree rows.
class StepArgument {
 public:
  // mask None: rows are a causal chain. Page ids that the step can reach are checked against
  // `cache`; the others are never read.
  StepArgument(pybind11::handle page_table, pybind11::handle kv_len, pybind11::handle cu_rows,
               pybind11::handle mask, const KvCacheView& cache);
  const StepView& view() const { return view_; }

 private:
  BorrowedTensor page_table_, kv_len_, cu_rows_, mask_;
  std::vector<std::uint32_t> mask_words_;  // when the caller's rows are shorter than kMaskWords
  std::vector<std::uint8_t> is_tree_;
  StepView view_;
};

// A packed tensor of rows [R, heads, K]: head dim contiguous, heads K apart, rows anywhere.
class RowsArgument {
 public:
  RowsArgument(pybind11::handle tensor, const char* name, std::int64_t rows, std::int64_t heads,
               std::int64_t head_dim, bool writable = false);
  const TensorView& view() const { return tensor_.view(); }
  std::int64_t row_stride() const { return tensor_.view().strides[0]; }

 private:
  BorrowedTensor tensor_;
};

}  // namespace specdec
