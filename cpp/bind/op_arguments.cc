#include "bind/op_arguments.h"

#include <algorithm>

#include "backend/step_check.h"
#include "base/check.h"
#include "base/pages.h"

namespace py = pybind11;

namespace specdec {

std::int64_t int_argument(py::handle value, const char* name) {
  try {
    return value.cast<std::int64_t>();
  } catch (const py::cast_error&) {
    throw py::type_error(detail::join(name, " is a ", Py_TYPE(value.ptr())->tp_name,
                                      ": give an integer of at most 63 bits"));
  }
}

BorrowedTensor vector_argument(OpCall& call, py::handle tensor, const char* name, DType dtype,
                               const char* what, std::int64_t size, bool writable) {
  BorrowedTensor t(tensor, name, writable);
  call.add(t.view(), name, writable);
  check_dtype(t.view(), name, {dtype});
  check_shape(t.view(), name, what, {size});
  check_contiguous(t.view(), name);
  return t;
}

PagesArgument::PagesArgument(OpCall& call, py::handle k_pages, py::handle v_pages, bool has_layers,
                             bool writable)
    : k_(k_pages, "k_pages", writable), v_(v_pages, "v_pages", writable) {
  const char* axes = has_layers ? "[layers, P, G, S, K]" : "[P, G, S, K]";
  const TensorView& k = k_.view();
  const TensorView& v = v_.view();
  const int first = has_layers ? 1 : 0;
  if (has_layers) {
    check_shape(k, "k_pages", axes, {kAny, kAny, kAny, kAny, kAny});
    check_shape(v, "v_pages", axes, {k.shape[0], k.shape[1], k.shape[2], k.shape[3], k.shape[4]});
  } else {
    check_shape(k, "k_pages", axes, {kAny, kAny, kAny, kAny});
    check_shape(v, "v_pages", axes, {k.shape[0], k.shape[1], k.shape[2], k.shape[3]});
  }
  call.add(k, "k_pages", writable);
  call.add(v, "v_pages", writable);
  check_dtype(k, "k_pages", {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3, DType::kI8});
  SPECDEC_REQUIRE(k.dtype != DType::kI8 || call.is_cpu(), "k_pages has dtype int8: backend \"",
                  call.backend().name, "\" has no kernels for it, float8_e4m3fn is as narrow");
  check_dtype(v, "v_pages", {k.dtype});
  check_last_axis_contiguous(k, "k_pages");
  check_last_axis_contiguous(v, "v_pages");
  for (int i = 0; i < k.ndim; ++i) {
    SPECDEC_REQUIRE(k.strides[i] == v.strides[i] || k.shape[i] <= 1, "v_pages has stride ",
                    v.strides[i], " on axis ", i, ", k_pages ", k.strides[i],
                    ": both need the same layout");
  }
  const std::int64_t page_size = k.shape[first + 2];
  const std::int64_t head_dim = head_dim_of(k.dtype, k.shape[first + 3]);
  SPECDEC_REQUIRE(is_page_size(page_size), "k_pages has a page size of ", page_size,
                  ": supported are powers of two from 1 to ", kMaxPageSize);
  SPECDEC_REQUIRE(head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0,
                  "k_pages has a head_dim of ", head_dim,
                  ": supported are multiples of 8 from 8 to 256");
  SPECDEC_REQUIRE(k.shape[first + 1] >= 1, "k_pages has ", k.shape[first + 1],
                  " KV heads: at least one is needed");
  view_.k = k.data;
  view_.v = v.data;
  view_.dtype = k.dtype;
  view_.num_layers = has_layers ? static_cast<std::int32_t>(k.shape[0]) : 1;
  view_.num_pages = static_cast<std::int32_t>(k.shape[first]);
  view_.num_kv_heads = static_cast<std::int32_t>(k.shape[first + 1]);
  view_.page_size = static_cast<std::int32_t>(page_size);
  view_.head_dim = static_cast<std::int32_t>(head_dim);
  view_.stride_layer = has_layers ? k.strides[0] : 0;
  view_.stride_page = k.strides[first];
  view_.stride_head = k.strides[first + 1];
  view_.stride_token = k.strides[first + 2];
}

ScalesArgument::ScalesArgument(OpCall& call, py::handle k_scale, py::handle v_scale,
                               const KvCacheView& cache) {
  if (k_scale.is_none() && v_scale.is_none()) return;
  const char* missing = k_scale.is_none() ? "k_scale" : "v_scale";
  SPECDEC_REQUIRE(!k_scale.is_none() && !v_scale.is_none(), missing,
                  " is None and the other is not: give both or none");
  SPECDEC_REQUIRE(cache.dtype == DType::kF8E4M3, "k_scale is given and k_pages has dtype ",
                  dtype_name(cache.dtype), ": scales belong to float8_e4m3fn pages");
  k_ = BorrowedTensor(k_scale, "k_scale");
  const std::int64_t size = k_->ndim == 1 ? k_->shape[0] : 0;
  SPECDEC_REQUIRE(size == 1 || size == cache.num_kv_heads, "k_scale has ", k_->numel(),
                  " values on ", k_->ndim, " axes: expected [1] or [G] = [", cache.num_kv_heads,
                  "]");
  k_ = vector_argument(call, k_scale, "k_scale", DType::kF32, "[1] or [G]", size);
  v_ = vector_argument(call, v_scale, "v_scale", DType::kF32, "that of k_scale", size);
  stride_ = size == 1 ? 0 : 1;
}

StepArgument::StepArgument(OpCall& call, const StepTensors& tensors, const KvCacheView& cache,
                           std::int64_t num_rows, int max_depth)
    : page_table_(tensors.page_table, "page_table") {
  const TensorView& table = page_table_.view();
  check_shape(table, "page_table", "[B, max_pages]", {kAny, kAny});
  call.add(table, "page_table");
  check_dtype(table, "page_table", {DType::kI32});
  check_contiguous(table, "page_table");
  const std::int64_t requests = table.shape[0], max_pages = table.shape[1];
  SPECDEC_REQUIRE(requests >= 1, "page_table has shape [0, ", max_pages,
                  "]: at least one request is needed");
  kv_len_ = vector_argument(call, tensors.kv_len, "kv_len", DType::kI32, "[B]", requests);
  cu_rows_ =
      vector_argument(call, tensors.cu_rows, "cu_rows", DType::kI32, "[B + 1]", requests + 1);
  view_.num_requests = static_cast<std::int32_t>(requests);
  view_.num_rows = static_cast<std::int32_t>(num_rows);
  view_.cu_rows = static_cast<const std::int32_t*>(cu_rows_->data);
  view_.kv_len = static_cast<const std::int32_t*>(kv_len_->data);
  view_.page_table = static_cast<const std::int32_t*>(table.data);
  view_.page_table_stride = static_cast<std::int32_t>(max_pages);
  const bool readable = call.reads_values();
  if (readable) {
    check_pages(view_, cache, "");
    view_.num_rows = view_.cu_rows[requests];
  }

  if (!tensors.mask.is_none()) {
    mask_ = BorrowedTensor(tensors.mask, "mask");
    const TensorView& words = mask_.view();
    call.add(words, "mask");
    check_dtype(words, "mask", {DType::kU32, DType::kI32});
    check_shape(words, "mask", "[R, W]", {view_.num_rows, kAny});
    check_contiguous(words, "mask");
    SPECDEC_REQUIRE(words.shape[1] >= 1 && words.shape[1] <= kMaskWords, "mask has ",
                    words.shape[1], " words per row: 1..", kMaskWords,
                    " are supported (32 rows per word)");
  }
  if (!tensors.is_tree.is_none()) {
    is_tree_tensor_ = BorrowedTensor(tensors.is_tree, "is_tree");
    check_dtype(is_tree_tensor_.view(), "is_tree", {DType::kU8, DType::kBool});
    is_tree_tensor_ =
        vector_argument(call, tensors.is_tree, "is_tree", is_tree_tensor_->dtype, "[B]", requests);
    view_.is_tree = static_cast<const std::uint8_t*>(is_tree_tensor_->data);
    for (std::int64_t b = 0; readable && b < requests; ++b) {
      SPECDEC_REQUIRE(view_.is_tree[b] == 0 || mask_.defined(), "mask is None and is_tree[", b,
                      "] = ", int{view_.is_tree[b]}, ": a tree needs a mask");
    }
  } else if (readable) {
    is_tree_.assign(requests, mask_.defined() ? 1 : 0);
    view_.is_tree = is_tree_.data();
  }
  if (mask_.defined()) {
    if (readable) {
      read_mask(max_depth);
    } else {
      take_mask();
    }
  }
  take_bounds(tensors, cache, readable);
}

// Widens the mask to kMaskWords per row and checks it.
void StepArgument::read_mask(int max_depth) {
  const std::int64_t width = mask_->shape[1];
  const auto* from = static_cast<const std::uint32_t*>(mask_->data);
  mask_words_.assign(static_cast<std::size_t>(view_.num_rows) * kMaskWords, 0);
  for (std::int64_t b = 0; b < view_.num_requests; ++b) {
    if (view_.is_tree[b] == 0) continue;
    const std::int32_t first = view_.cu_rows[b];
    const int rows = view_.cu_rows[b + 1] - first;
    SPECDEC_REQUIRE(rows <= width * 32, "mask has ", width, " words per row: the ", rows,
                    " rows of request ", b, " need ", (rows + 31) / 32, " (at most ", kMaskWords,
                    "; longer requests are causal, mask=None)");
    for (int i = 0; i < rows; ++i) {
      std::uint32_t* to = mask_words_.data() + std::int64_t{first + i} * kMaskWords;
      for (int w = 0; w < width; ++w) to[w] = from[(first + i) * width + w];
      const int depth = check_mask_row(to, i, b);
      SPECDEC_REQUIRE(depth <= max_depth, "max_depth = ", max_depth, ": row ", i, " of request ", b,
                      " has ", depth, " ancestors");
    }
  }
  view_.mask = mask_words_.data();
}

// Device kernels read whole rows of kMaskWords words.
void StepArgument::take_mask() {
  SPECDEC_REQUIRE(mask_->shape[1] == kMaskWords, "mask has ", mask_->shape[1],
                  " words per row: on a device ", kMaskWords, " are needed");
  view_.mask = static_cast<const std::uint32_t*>(mask_->data);
}

void StepArgument::take_bounds(const StepTensors& tensors, const KvCacheView& cache,
                               bool readable) {
  const std::int64_t capacity = std::int64_t{view_.page_table_stride} * cache.page_size;
  std::int64_t rows = std::min<std::int64_t>(view_.num_rows, capacity), keys = capacity;
  if (!tensors.max_rows.is_none()) {
    const auto given = int_argument(tensors.max_rows, "max_rows");
    SPECDEC_REQUIRE(given >= 0, "max_rows = ", given, ": give the most rows of one request");
    rows = std::min(rows, given);
  }
  if (!tensors.max_kv_len.is_none()) {
    const auto given = int_argument(tensors.max_kv_len, "max_kv_len");
    SPECDEC_REQUIRE(given >= 0, "max_kv_len = ", given,
                    ": give the most tokens of one request, its rows included");
    keys = std::min(keys, given);
  }
  for (std::int64_t b = 0; readable && b < view_.num_requests; ++b) {
    const std::int64_t own = view_.cu_rows[b + 1] - view_.cu_rows[b];
    SPECDEC_REQUIRE(own <= rows, "max_rows = ", rows, ": request ", b, " has ", own, " rows");
    SPECDEC_REQUIRE(own == 0 || view_.kv_len[b] + own <= keys, "max_kv_len = ", keys, ": request ",
                    b, " has kv_len + rows = ", view_.kv_len[b] + own);
  }
  view_.max_rows = static_cast<std::int32_t>(rows);
  view_.max_kv_len = static_cast<std::int32_t>(std::min<std::int64_t>(keys, INT32_MAX));
}

RowsArgument::RowsArgument(OpCall& call, py::handle tensor, const char* name, std::int64_t rows,
                           std::int64_t heads, std::int64_t head_dim, bool writable)
    : tensor_(tensor, name, writable) {
  const TensorView& t = tensor_.view();
  check_shape(t, name, "[R, heads, K]", {rows, heads, head_dim});
  call.add(t, name, writable);
  check_dtype(t, name, {DType::kF32, DType::kBF16, DType::kF16});
  check_last_axis_contiguous(t, name);
  SPECDEC_REQUIRE(t.shape[1] <= 1 || t.strides[1] == head_dim, name, " has stride ", t.strides[1],
                  " between heads: heads lie head_dim = ", head_dim, " elements apart");
  SPECDEC_REQUIRE(!writable || rows <= 1 || std::abs(t.strides[0]) >= heads * head_dim, name,
                  " has overlapping rows (stride ", t.strides[0], ")");
}

BorrowedTensor tensor_argument(OpCall& call, py::handle tensor, const char* name, const char* what,
                               DType dtype, std::initializer_list<std::int64_t> shape,
                               bool writable) {
  BorrowedTensor t(tensor, name, writable);
  check_shape(t.view(), name, what, shape);
  call.add(t.view(), name, writable);
  check_dtype(t.view(), name, {dtype});
  check_contiguous(t.view(), name);
  return t;
}

}  // namespace specdec
