// The operations of the CPU backend on tensors. Conversion and checks here, arithmetic in backend/.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/cpu/attention/cpu_attention.h"
#include "base/check.h"
#include "base/thread_pool.h"
#include "bind/op_arguments.h"
#include "bind/registers.h"
#include "engine/step_plan.h"
#include "tree/draft_tree.h"

namespace py = pybind11;

namespace specdec {
namespace {

void run_attention(const StepView& step, const KvCacheView& cache, int layer, py::handle q,
                   py::handle out, float scale, int sliding_window, float softcap,
                   py::handle sinks) {
  SpecAttentionParams p;
  p.step = step;
  p.cache = cache;
  p.layer = layer;
  SPECDEC_REQUIRE(std::isfinite(scale), "scale = ", scale, ": give a finite number");
  SPECDEC_REQUIRE(sliding_window >= 0, "sliding_window = ", sliding_window,
                  ": give 0 (none) or a positive number of tokens");
  SPECDEC_REQUIRE(std::isfinite(softcap) && softcap >= 0, "softcap = ", softcap,
                  ": give 0 (none) or a positive number");
  const BorrowedTensor shape(q, "q");
  check_shape(shape.view(), "q", "[R, H, K]", {step.num_rows, kAny, cache.head_dim});
  const std::int64_t heads = shape->shape[1];
  SPECDEC_REQUIRE(heads >= 1 && heads % cache.num_kv_heads == 0, "q has ", heads,
                  " heads: a multiple of the ", cache.num_kv_heads, " KV heads is needed");
  const RowsArgument rows(q, "q", step.num_rows, heads, cache.head_dim);
  const RowsArgument result(out, "out", step.num_rows, heads, cache.head_dim, true);
  check_dtype(result.view(), "out", {rows.view().dtype});
  SPECDEC_REQUIRE(step.num_rows <= 1 || std::abs(result.row_stride()) >= heads * cache.head_dim,
                  "out has overlapping rows (stride ", result.row_stride(), ")");
  BorrowedTensor sink;
  if (!sinks.is_none()) {
    sink = BorrowedTensor(sinks, "sinks");
    check_shape(sink.view(), "sinks", "[H]", {heads});
    check_cpu(sink.view(), "sinks");
    check_dtype(sink.view(), "sinks", {DType::kF32});
    check_contiguous(sink.view(), "sinks");
    p.sinks = static_cast<const float*>(sink->data);
  }
  p.q = rows.view().data;
  p.out = result.view().data;
  p.q_row_stride = rows.row_stride();
  p.out_row_stride = result.row_stride();
  p.num_heads = static_cast<std::int32_t>(heads);
  p.dtype = rows.view().dtype;
  p.scale = scale;
  p.sliding_window = sliding_window;
  p.softcap = softcap;
  py::gil_scoped_release release;
  cpu::spec_attention(p);
}

void run_append(const StepView& step, const KvCacheView& cache, int layer, py::handle k,
                py::handle v) {
  const RowsArgument k_rows(k, "k", step.num_rows, cache.num_kv_heads, cache.head_dim);
  const RowsArgument v_rows(v, "v", step.num_rows, cache.num_kv_heads, cache.head_dim);
  check_dtype(v_rows.view(), "v", {k_rows.view().dtype});
  AppendKvParams p;
  p.step = step;
  p.cache = cache;
  p.layer = layer;
  p.k = k_rows.view().data;
  p.v = v_rows.view().data;
  p.k_row_stride = k_rows.row_stride();
  p.v_row_stride = v_rows.row_stride();
  p.dtype = k_rows.view().dtype;
  py::gil_scoped_release release;
  cpu::append_kv(p);
}

void check_layer(int layer, const KvCacheView& cache) {
  SPECDEC_REQUIRE(layer >= 0 && layer < cache.num_layers, "layer = ", layer, ": layers are 0..",
                  cache.num_layers - 1);
}

// A plan's page ids come from the executor; a plan made by hand may name any.
void check_plan(const StepPlan& plan, const KvCacheView& cache) {
  for (int b = 0; b < plan.num_requests; ++b) {
    const int tokens = plan.kv_len[b] + plan.cu_rows[b + 1] - plan.cu_rows[b];
    const int used = (tokens + cache.page_size - 1) / cache.page_size;
    SPECDEC_REQUIRE(used <= plan.page_table_stride, "plan.page_table has ", plan.page_table_stride,
                    " pages for request ", b, ": ", tokens, " tokens need ", used, " pages of ",
                    cache.page_size);
    for (int i = 0; i < used; ++i) {
      const std::int32_t id =
          plan.page_table[static_cast<std::size_t>(b) * plan.page_table_stride + i];
      SPECDEC_REQUIRE(id >= 0 && id < cache.num_pages, "plan.page_table[", b, ", ", i, "] = ", id,
                      ": page ids are 0..", cache.num_pages - 1);
    }
  }
}

void compact_kv(py::handle k_pages, py::handle v_pages, py::handle page_table, py::handle kv_len,
                py::handle cu_rows, py::handle path, py::handle path_len) {
  const PagesArgument pages(k_pages, v_pages, true);
  const StepArgument step(page_table, kv_len, cu_rows, py::none(), pages.view());
  const std::int64_t requests = step.view().num_requests;
  const BorrowedTensor nodes(path, "path");
  check_shape(nodes.view(), "path", "[B, max_path]", {requests, kAny});
  check_cpu(nodes.view(), "path");
  check_dtype(nodes.view(), "path", {DType::kI32});
  check_contiguous(nodes.view(), "path");
  const BorrowedTensor counts(path_len, "path_len");
  check_shape(counts.view(), "path_len", "[B]", {requests});
  check_cpu(counts.view(), "path_len");
  check_dtype(counts.view(), "path_len", {DType::kI32});
  check_contiguous(counts.view(), "path_len");
  const auto* from = static_cast<const std::int32_t*>(nodes->data);
  const auto* lengths = static_cast<const std::int32_t*>(counts->data);
  const std::int64_t width = nodes->shape[1];
  std::vector<std::int32_t> wide(static_cast<std::size_t>(requests) * kMaxStepTokens);
  for (std::int64_t b = 0; b < requests; ++b) {
    const int rows = step.view().cu_rows[b + 1] - step.view().cu_rows[b];
    const std::int64_t most = std::min<std::int64_t>({width, rows - 1, kMaxDraftLen});
    SPECDEC_REQUIRE(lengths[b] >= 0 && lengths[b] <= most, "path_len[", b, "] = ", lengths[b],
                    ": request ", b, " has ", rows - 1, " drafts and path ", width,
                    " columns, so it is 0..", most);
    for (int i = 0; i < lengths[b]; ++i) {
      const std::int32_t node = from[b * width + i];
      const std::int32_t previous = i == 0 ? 0 : from[b * width + i - 1];
      SPECDEC_REQUIRE(node > previous && node < rows, "path[", b, ", ", i, "] = ", node,
                      ": a path increases from 1 to at most ", rows - 1, " (the entry before is ",
                      previous, ")");
      wide[b * kMaxStepTokens + i] = node;
    }
  }
  CompactKvParams p;
  p.step = step.view();
  p.cache = pages.view();
  p.path = wide.data();
  p.path_len = lengths;
  py::gil_scoped_release release;
  cpu::compact_kv(p);
}

void argmax(py::handle scores, py::handle out) {
  const BorrowedTensor from(scores, "scores");
  check_shape(from.view(), "scores", "[rows, V]", {kAny, kAny});
  check_cpu(from.view(), "scores");
  check_dtype(from.view(), "scores", {DType::kF32});
  check_last_axis_contiguous(from.view(), "scores");
  SPECDEC_REQUIRE(from->shape[1] >= 1 && from->shape[1] <= INT32_MAX, "scores has ", from->shape[1],
                  " columns: at least one is needed");
  const BorrowedTensor ids(out, "out", true);
  check_shape(ids.view(), "out", "[rows]", {from->shape[0]});
  check_cpu(ids.view(), "out");
  check_dtype(ids.view(), "out", {DType::kI32});
  check_contiguous(ids.view(), "out");
  ArgmaxParams p;
  p.scores = static_cast<const float*>(from->data);
  p.row_stride = from->strides[0];
  p.rows = static_cast<std::int32_t>(from->shape[0]);
  p.vocab = static_cast<std::int32_t>(from->shape[1]);
  p.ids = static_cast<TokenId*>(ids->data);
  py::gil_scoped_release release;
  cpu::argmax(p);
}

py::array_t<std::uint32_t> pack_mask(py::handle mask) {
  const BorrowedTensor from(mask, "mask");
  check_shape(from.view(), "mask", "[R, n]", {kAny, kAny});
  check_cpu(from.view(), "mask");
  check_dtype(from.view(), "mask", {DType::kBool});
  const std::int64_t rows = from->shape[0], n = from->shape[1];
  SPECDEC_REQUIRE(n >= 1 && n <= kMaxStepTokens, "mask has ", n, " columns: 1..", kMaxStepTokens,
                  " step tokens can be masked");
  py::array_t<std::uint32_t> words({rows, (n + 31) / 32});
  auto to = words.mutable_unchecked<2>();
  const auto* bits = static_cast<const std::uint8_t*>(from->data);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t w = 0; w < to.shape(1); ++w) to(i, w) = 0;
    for (std::int64_t j = 0; j < n; ++j) {
      const bool bit = bits[i * from->strides[0] + j * from->strides[1]] != 0;
      to(i, j >> 5) |= std::uint32_t{bit} << (j & 31);
    }
  }
  return words;
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
  m.def(
      "spec_attention",
      [](py::handle q, py::handle k_pages, py::handle v_pages, py::handle page_table,
         py::handle kv_len, py::handle cu_rows, py::handle mask, py::handle out, float scale,
         int sliding_window, float softcap, py::handle sinks) {
        const PagesArgument pages(k_pages, v_pages, false);
        const StepArgument step(page_table, kv_len, cu_rows, mask, pages.view());
        run_attention(step.view(), pages.view(), 0, q, out, scale, sliding_window, softcap, sinks);
      },
      py::arg("q"), py::arg("k_pages"), py::arg("v_pages"), py::arg("page_table"),
      py::arg("kv_len"), py::arg("cu_rows"), py::kw_only(), py::arg("mask") = py::none(),
      py::arg("out"), py::arg("scale"), py::arg("sliding_window") = 0, py::arg("softcap") = 0.0f,
      py::arg("sinks") = py::none(), "See specdec_ext.ops.spec_attention.");
  m.def(
      "append_kv",
      [](py::handle k, py::handle v, py::handle k_pages, py::handle v_pages, py::handle page_table,
         py::handle kv_len, py::handle cu_rows) {
        const PagesArgument pages(k_pages, v_pages, false);
        const StepArgument step(page_table, kv_len, cu_rows, py::none(), pages.view());
        run_append(step.view(), pages.view(), 0, k, v);
      },
      py::arg("k"), py::arg("v"), py::arg("k_pages"), py::arg("v_pages"), py::arg("page_table"),
      py::arg("kv_len"), py::arg("cu_rows"), "See specdec_ext.ops.append_kv.");
  m.def("compact_kv", &compact_kv, py::arg("k_pages"), py::arg("v_pages"), py::arg("page_table"),
        py::arg("kv_len"), py::arg("cu_rows"), py::arg("path"), py::arg("path_len"),
        "See specdec_ext.ops.compact_kv.");
  m.def("argmax", &argmax, py::arg("scores"), py::arg("out"), "See specdec_ext.ops.argmax.");
  m.def("pack_mask", &pack_mask, py::arg("mask"), "See specdec_ext.ops.pack_mask.");
  m.def("mask_from_parents", &mask_from_parents, py::arg("parents"),
        "See specdec_ext.ops.mask_from_parents.");
  m.def(
      "step_append_kv",
      [](const StepPlan& plan, int layer, py::handle k, py::handle v, py::handle k_pages,
         py::handle v_pages) {
        const PagesArgument pages(k_pages, v_pages, true);
        check_layer(layer, pages.view());
        check_plan(plan, pages.view());
        run_append(plan.view(), pages.view(), layer, k, v);
      },
      py::arg("plan"), py::arg("layer"), py::arg("k"), py::arg("v"), py::arg("k_pages"),
      py::arg("v_pages"), "See specdec_ext.ops.step_append_kv.");
  m.def(
      "step_attention",
      [](const StepPlan& plan, int layer, py::handle q, py::handle out, py::handle k_pages,
         py::handle v_pages, float scale, int sliding_window, float softcap, py::handle sinks) {
        const PagesArgument pages(k_pages, v_pages, true);
        check_layer(layer, pages.view());
        check_plan(plan, pages.view());
        run_attention(plan.view(), pages.view(), layer, q, out, scale, sliding_window, softcap,
                      sinks);
      },
      py::arg("plan"), py::arg("layer"), py::arg("q"), py::arg("out"), py::arg("k_pages"),
      py::arg("v_pages"), py::arg("scale"), py::arg("sliding_window") = 0,
      py::arg("softcap") = 0.0f, py::arg("sinks") = py::none(),
      "See specdec_ext.ops.step_attention.");
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
