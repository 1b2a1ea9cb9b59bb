#include "bind/op_arguments.h"

#include <bit>

#include "base/check.h"

namespace py = pybind11;

namespace specdec {
namespace {

BorrowedTensor int32_vector(py::handle tensor, const char* name, const char* what,
                            std::int64_t size) {
  BorrowedTensor t(tensor, name);
  check_cpu(t.view(), name);
  check_dtype(t.view(), name, {DType::kI32});
  check_shape(t.view(), name, what, {size});
  check_contiguous(t.view(), name);
  return t;
}

}  // namespace

PagesArgument::PagesArgument(py::handle k_pages, py::handle v_pages, bool has_layers)
    : k_(k_pages, "k_pages", true), v_(v_pages, "v_pages", true) {
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
  check_cpu(k, "k_pages");
  check_cpu(v, "v_pages");
  check_dtype(k, "k_pages", {DType::kF32, DType::kBF16, DType::kF16});
  check_dtype(v, "v_pages", {k.dtype});
  check_last_axis_contiguous(k, "k_pages");
  check_last_axis_contiguous(v, "v_pages");
  for (int i = 0; i < k.ndim; ++i) {
    SPECDEC_REQUIRE(k.strides[i] == v.strides[i] || k.shape[i] <= 1, "v_pages has stride ",
                    v.strides[i], " on axis ", i, ", k_pages ", k.strides[i],
                    ": both need the same layout");
  }
  const std::int64_t page_size = k.shape[first + 2], head_dim = k.shape[first + 3];
  SPECDEC_REQUIRE(
      page_size >= 1 && page_size <= 128 && std::has_single_bit(static_cast<unsigned>(page_size)),
      "k_pages has a page size of ", page_size, ": supported are powers of two from 1 to 128");
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

StepArgument::StepArgument(py::handle page_table, py::handle kv_len, py::handle cu_rows,
                           py::handle mask, const KvCacheView& cache)
    : page_table_(page_table, "page_table") {
  const TensorView& table = page_table_.view();
  check_shape(table, "page_table", "[B, max_pages]", {kAny, kAny});
  check_cpu(table, "page_table");
  check_dtype(table, "page_table", {DType::kI32});
  check_contiguous(table, "page_table");
  const std::int64_t requests = table.shape[0], max_pages = table.shape[1];
  SPECDEC_REQUIRE(requests >= 1, "page_table has shape [0, ", max_pages,
                  "]: at least one request is needed");
  kv_len_ = int32_vector(kv_len, "kv_len", "[B]", requests);
  cu_rows_ = int32_vector(cu_rows, "cu_rows", "[B + 1]", requests + 1);
  const auto* lengths = static_cast<const std::int32_t*>(kv_len_->data);
  const auto* first_row = static_cast<const std::int32_t*>(cu_rows_->data);
  const auto* pages = static_cast<const std::int32_t*>(table.data);
  SPECDEC_REQUIRE(first_row[0] == 0, "cu_rows[0] = ", first_row[0], ": it starts at 0");
  for (std::int64_t b = 0; b < requests; ++b) {
    SPECDEC_REQUIRE(first_row[b + 1] > first_row[b], "cu_rows[", b + 1, "] = ", first_row[b + 1],
                    ": it has to exceed cu_rows[", b, "] = ", first_row[b],
                    " (every request has at least one row)");
    SPECDEC_REQUIRE(lengths[b] >= 0, "kv_len[", b, "] = ", lengths[b],
                    ": lengths are not negative");
    const std::int64_t tokens = std::int64_t{lengths[b]} + first_row[b + 1] - first_row[b];
    const std::int64_t used = (tokens + cache.page_size - 1) / cache.page_size;
    SPECDEC_REQUIRE(used <= max_pages, "page_table has ", max_pages, " pages for request ", b,
                    ": kv_len + rows = ", tokens, " tokens need ", used, " pages of ",
                    cache.page_size);
    for (std::int64_t i = 0; i < used; ++i) {
      const std::int32_t id = pages[b * max_pages + i];
      SPECDEC_REQUIRE(id >= 0 && id < cache.num_pages, "page_table[", b, ", ", i, "] = ", id,
                      ": page ids are 0..", cache.num_pages - 1);
    }
  }
  view_.num_requests = static_cast<std::int32_t>(requests);
  view_.num_rows = first_row[requests];
  view_.cu_rows = first_row;
  view_.kv_len = lengths;
  view_.page_table = pages;
  view_.page_table_stride = static_cast<std::int32_t>(max_pages);
  is_tree_.assign(requests, mask.is_none() ? 0 : 1);
  view_.is_tree = is_tree_.data();
  if (mask.is_none()) return;

  mask_ = BorrowedTensor(mask, "mask");
  const TensorView& words = mask_.view();
  check_cpu(words, "mask");
  check_dtype(words, "mask", {DType::kU32, DType::kI32});
  check_shape(words, "mask", "[R, W]", {view_.num_rows, kAny});
  check_contiguous(words, "mask");
  const std::int64_t width = words.shape[1];
  SPECDEC_REQUIRE(width >= 1 && width <= kMaskWords, "mask has ", width, " words per row: 1..",
                  kMaskWords, " are supported (32 rows per word)");
  mask_words_.assign(static_cast<std::size_t>(view_.num_rows) * kMaskWords, 0);
  const auto* from = static_cast<const std::uint32_t*>(words.data);
  for (std::int64_t b = 0; b < requests; ++b) {
    const int rows = first_row[b + 1] - first_row[b];
    SPECDEC_REQUIRE(rows <= width * 32, "mask has ", width, " words per row: the ", rows,
                    " rows of request ", b, " need ", (rows + 31) / 32, " (at most ", kMaskWords,
                    "; longer requests are causal, mask=None)");
    for (int i = 0; i < rows; ++i) {
      std::uint32_t* to = mask_words_.data() + std::int64_t{first_row[b] + i} * kMaskWords;
      for (int w = 0; w < width; ++w) to[w] = from[(first_row[b] + i) * width + w];
      SPECDEC_REQUIRE((to[i >> 5] >> (i & 31)) & 1u, "mask row ", i, " of request ", b,
                      " lacks its own bit: a row sees itself");
      bool later = i % 32 != 31 && (to[i >> 5] >> ((i & 31) + 1)) != 0;
      for (int w = (i >> 5) + 1; w < kMaskWords; ++w) later = later || to[w] != 0;
      SPECDEC_REQUIRE(!later, "mask row ", i, " of request ", b,
                      " has a bit of a later row: ancestors come before their descendants");
    }
  }
  view_.mask = mask_words_.data();
}

RowsArgument::RowsArgument(py::handle tensor, const char* name, std::int64_t rows,
                           std::int64_t heads, std::int64_t head_dim, bool writable)
    : tensor_(tensor, name, writable) {
  const TensorView& t = tensor_.view();
  check_shape(t, name, "[R, heads, K]", {rows, heads, head_dim});
  check_cpu(t, name);
  check_dtype(t, name, {DType::kF32, DType::kBF16, DType::kF16});
  check_last_axis_contiguous(t, name);
  SPECDEC_REQUIRE(t.shape[1] <= 1 || t.strides[1] == head_dim, name, " has stride ", t.strides[1],
                  " between heads: heads lie head_dim = ", head_dim, " elements apart");
}

}  // namespace specdec
