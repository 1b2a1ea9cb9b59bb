// The operations of a step that touch no K/V: its geometry, masks and argmax; CPU threads.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "base/check.h"
#include "base/pages.h"
#include "base/thread_pool.h"
#include "bind/op_arguments.h"
#include "bind/registers.h"
#include "tree/draft_tree.h"

namespace py = pybind11;

namespace specdec {
namespace {

void argmax(py::handle scores, py::handle out, py::object backend, std::uint64_t stream,
            py::object workspace) {
  const CallOptions where{std::move(backend), stream, std::move(workspace), py::none()};
  OpCall call("argmax", where);
  const BorrowedTensor from(scores, "scores");
  check_shape(from.view(), "scores", "[rows, V]", {kAny, kAny});
  call.add(from.view(), "scores");
  check_dtype(from.view(), "scores", {DType::kF32, DType::kBF16, DType::kF16});
  check_last_axis_contiguous(from.view(), "scores");
  SPECDEC_REQUIRE(from->shape[1] >= 1 && from->shape[1] <= INT32_MAX, "scores has ", from->shape[1],
                  " columns: at least one is needed");
  const BorrowedTensor ids =
      vector_argument(call, out, "out", DType::kI32, "[rows]", from->shape[0], true);
  ArgmaxParams p;
  p.scores = from->data;
  p.row_stride = from->strides[0];
  p.rows = static_cast<std::int32_t>(from->shape[0]);
  p.vocab = static_cast<std::int32_t>(from->shape[1]);
  p.ids = static_cast<TokenId*>(ids->data);
  p.dtype = from->dtype;
  if (p.rows == 0) return;
  const auto wanted = call.backend().argmax_workspace_bytes;
  p.exec = call.context(0, 0, wanted == nullptr ? 0 : wanted(p.rows, p.vocab));
  call.run(&Backend::argmax, p);
}

void pack_mask(py::handle mask, py::handle out, py::object backend, std::uint64_t stream) {
  const CallOptions where{std::move(backend), stream, py::none(), py::none()};
  OpCall call("pack_mask", where);
  const BorrowedTensor from(mask, "mask");
  check_shape(from.view(), "mask", "[R, n]", {kAny, kAny});
  call.add(from.view(), "mask");
  check_dtype(from.view(), "mask", {DType::kBool});
  const std::int64_t rows = from->shape[0], n = from->shape[1];
  SPECDEC_REQUIRE(n >= 1 && n <= kMaxStepTokens, "mask has ", n, " columns: 1..", kMaxStepTokens,
                  " step tokens can be masked");
  const BorrowedTensor words(out, "out", true);
  check_shape(words.view(), "out", "[R, W]", {rows, kAny});
  call.add(words.view(), "out", true);
  check_dtype(words.view(), "out", {DType::kU32, DType::kI32});
  check_contiguous(words.view(), "out");
  const std::int64_t width = words->shape[1];
  SPECDEC_REQUIRE(width >= (n + 31) / 32 && width <= kMaskWords, "out has ", width,
                  " words per row: the ", n, " columns of mask need ", (n + 31) / 32, " (at most ",
                  kMaskWords, ")");
  PackMaskParams p;
  p.mask = static_cast<const std::uint8_t*>(from->data);
  p.row_stride = from->strides[0];
  p.column_stride = from->strides[1];
  p.rows = static_cast<std::int32_t>(rows);
  p.cols = static_cast<std::int32_t>(n);
  p.words = static_cast<std::uint32_t*>(words->data);
  p.num_words = static_cast<std::int32_t>(width);
  p.exec = call.context(0);
  if (rows == 0) return;
  call.run(&Backend::pack_mask, p);
}

// The pool's page_size and num_pages as the caller states them: there are no pages in this call.
KvCacheView pool_of(std::int64_t page_size, std::int64_t num_pages) {
  SPECDEC_REQUIRE(is_page_size(page_size), "page_size = ", page_size,
                  ": supported are powers of two from 1 to ", kMaxPageSize);
  SPECDEC_REQUIRE(num_pages >= 1 && num_pages <= INT32_MAX, "num_pages = ", num_pages,
                  ": give the pages of the pool");
  KvCacheView pool;
  pool.page_size = static_cast<std::int32_t>(page_size);
  pool.num_pages = static_cast<std::int32_t>(num_pages);
  return pool;
}

void build_step(py::handle parents, py::handle page_table, py::handle kv_len, py::handle cu_rows,
                py::handle positions, py::handle mask, py::handle is_tree, py::handle slots,
                std::int64_t page_size, std::int64_t num_pages, int max_depth, py::handle max_rows,
                const CallOptions& where) {
  SPECDEC_REQUIRE(max_depth >= 0 && max_depth <= kMaxDraftLen, "max_depth = ", max_depth,
                  ": give 0..", kMaxDraftLen);
  const KvCacheView pool = pool_of(page_size, num_pages);
  OpCall call("build_step", where);
  const BorrowedTensor rows(parents, "parents");
  check_shape(rows.view(), "parents", "[R]", {kAny});
  const std::int64_t num_rows = rows->shape[0];
  const BorrowedTensor tree =
      vector_argument(call, parents, "parents", DType::kI32, "[R]", num_rows);
  const StepArgument step(
      call, {page_table, kv_len, cu_rows, py::none(), py::none(), max_rows, py::none()}, pool,
      num_rows, max_depth);
  SPECDEC_REQUIRE(step.view().num_rows <= num_rows, "parents has ", num_rows,
                  " entries: cu_rows names ", step.view().num_rows, " rows");
  BuildStepParams p;
  p.step = step.view();
  p.step.num_rows = static_cast<std::int32_t>(num_rows);  // rows past the last request: padding
  p.step.parents = static_cast<const std::int32_t*>(tree->data);
  p.max_depth = max_depth;
  p.num_pages = pool.num_pages;
  p.page_size = pool.page_size;
  const BorrowedTensor position =
      vector_argument(call, positions, "positions", DType::kI32, "[R]", num_rows, true);
  p.positions = static_cast<std::int32_t*>(position->data);
  const BorrowedTensor words(mask, "mask", true);
  check_shape(words.view(), "mask", "[R, 4]", {num_rows, kMaskWords});
  call.add(words.view(), "mask", true);
  check_dtype(words.view(), "mask", {DType::kU32, DType::kI32});
  check_contiguous(words.view(), "mask");
  p.mask = static_cast<std::uint32_t*>(words->data);
  const BorrowedTensor trees =
      vector_argument(call, is_tree, "is_tree", DType::kU8, "[B]", p.step.num_requests, true);
  p.is_tree = static_cast<std::uint8_t*>(trees->data);
  BorrowedTensor slot;
  if (!slots.is_none()) {
    slot = vector_argument(call, slots, "slots", DType::kI64, "[R]", num_rows, true);
    p.slots = static_cast<std::int64_t*>(slot->data);
  }
  p.exec = call.context(p.step.num_requests);
  if (num_rows == 0) return;
  call.run(&Backend::build_step, p);
}

py::array_t<std::uint32_t> mask_from_parents(const std::vector<std::int32_t>& parents) {
  const auto n = static_cast<std::int32_t>(parents.size());
  validate_tree(nullptr, parents.data(), n, 0);
  std::vector<std::uint32_t> mask(static_cast<std::size_t>(n) * kMaskWords);
  derive_mask(parents.data(), n, mask.data());
  py::array_t<std::uint32_t> words({n, (n + 31) / 32});
  auto to = words.mutable_unchecked<2>();
  for (std::int32_t i = 0; i < n; ++i) {
    for (py::ssize_t w = 0; w < to.shape(1); ++w) to(i, w) = mask[i * kMaskWords + w];
  }
  return words;
}

}  // namespace

void register_ops(py::module_& m) {
  m.def("argmax", &argmax, py::arg("scores"), py::arg("out"), py::kw_only(),
        py::arg("backend") = py::none(), py::arg("stream") = 0, py::arg("workspace") = py::none(),
        "See specdec_ext.ops.argmax.");
  m.def("pack_mask", &pack_mask, py::arg("mask"), py::arg("out"), py::kw_only(),
        py::arg("backend") = py::none(), py::arg("stream") = 0, "See specdec_ext.ops.pack_mask.");
  m.def(
      "build_step",
      [](py::handle parents, py::handle page_table, py::handle kv_len, py::handle cu_rows,
         py::handle positions, py::handle mask, py::handle is_tree, py::handle slots,
         std::int64_t page_size, std::int64_t num_pages, int max_depth, py::handle max_rows,
         py::object backend, std::uint64_t stream, py::object status) {
        const CallOptions where{std::move(backend), stream, py::none(), std::move(status)};
        build_step(parents, page_table, kv_len, cu_rows, positions, mask, is_tree, slots, page_size,
                   num_pages, max_depth, max_rows, where);
      },
      py::arg("parents"), py::arg("page_table"), py::arg("kv_len"), py::arg("cu_rows"),
      py::kw_only(), py::arg("positions"), py::arg("mask"), py::arg("is_tree"),
      py::arg("slots") = py::none(), py::arg("page_size"), py::arg("num_pages"),
      py::arg("max_depth") = kMaxDraftLen, py::arg("max_rows") = py::none(),
      py::arg("backend") = py::none(), py::arg("stream") = 0, py::arg("status") = py::none(),
      "See specdec_ext.ops.build_step.");
  m.def("mask_from_parents", &mask_from_parents, py::arg("parents"),
        "See specdec_ext.ops.mask_from_parents.");
  m.def(
      "set_num_threads",
      [](int n) {
        py::gil_scoped_release release;
        ThreadPool::global().resize(n);
      },
      py::arg("num_threads"), "See specdec_ext.ops.set_num_threads.");
  m.def("num_threads", [] { return ThreadPool::global().size(); }, "Threads of the CPU backend.");
}

}  // namespace specdec
