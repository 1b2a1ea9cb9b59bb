// Appending and compacting K/V on tensors. Conversion and checks here, arithmetic in the backends.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/step_check.h"
#include "base/check.h"
#include "bind/left_sums.h"
#include "bind/op_arguments.h"
#include "bind/registers.h"
#include "engine/step_plan.h"

namespace py = pybind11;

namespace specdec {
namespace {

// Rows of a packed [R, heads, K] tensor, where cu_rows cannot be read to know them.
std::int64_t packed_rows(const OpCall& call, py::handle tensor, const char* name) {
  if (call.reads_values()) return 0;
  const BorrowedTensor t(tensor, name);
  check_shape(t.view(), name, "[R, G, K]", {kAny, kAny, kAny});
  return t->shape[0];
}

void run_append(OpCall& call, const StepView& step, const KvCacheView& cache, int layer,
                py::handle k, py::handle v, py::handle k_scale, py::handle v_scale) {
  const RowsArgument k_rows(call, k, "k", step.num_rows, cache.num_kv_heads, cache.head_dim);
  const RowsArgument v_rows(call, v, "v", step.num_rows, cache.num_kv_heads, cache.head_dim);
  check_dtype(v_rows.view(), "v", {k_rows.view().dtype});
  const ScalesArgument scales(call, k_scale, v_scale, cache);
  AppendKvParams p;
  p.step = step;
  p.cache = cache;
  p.layer = layer;
  p.k = k_rows.view().data;
  p.v = v_rows.view().data;
  p.k_row_stride = k_rows.row_stride();
  p.v_row_stride = v_rows.row_stride();
  p.dtype = k_rows.view().dtype;
  p.k_scale = scales.k();
  p.v_scale = scales.v();
  p.scale_stride = scales.stride();
  p.exec = call.context(step.num_requests);
  if (step.num_rows == 0) return;
  call.run(&Backend::append_kv, p);
}

// A [K] weight of q's or k's RMSNorm.
const void* norm_weight(OpCall& call, py::handle weight, const char* name, std::int64_t head_dim,
                        BorrowedTensor* keep, DType* dtype) {
  if (weight.is_none()) return nullptr;
  *keep = BorrowedTensor(weight, name);
  check_dtype(keep->view(), name, {DType::kF32, DType::kBF16, DType::kF16});
  *keep = vector_argument(call, weight, name, (*keep)->dtype, "[K]", head_dim);
  *dtype = (*keep)->dtype;
  return (*keep)->data;
}

// cos and sin [max_positions, rotary_dim / 2].
struct RopeTables {
  BorrowedTensor cos, sin;
};

RopeTables rope_tables(OpCall& call, py::handle cos, py::handle sin, RopeAppendKvParams* p) {
  RopeTables tables;
  SPECDEC_REQUIRE(cos.is_none() == sin.is_none(), cos.is_none() ? "cos" : "sin",
                  " is None and the other is not: give both or none");
  if (cos.is_none()) return tables;
  tables.cos = BorrowedTensor(cos, "cos");
  tables.sin = BorrowedTensor(sin, "sin");
  const TensorView& c = tables.cos.view();
  check_shape(c, "cos", "[max_positions, rotary_dim / 2]", {kAny, kAny});
  check_shape(tables.sin.view(), "sin", "cos's shape", {c.shape[0], c.shape[1]});
  const std::int64_t head_dim = p->cache.head_dim;
  SPECDEC_REQUIRE(c.shape[1] >= 1 && c.shape[1] * 2 <= head_dim, "cos has ", c.shape[1],
                  " columns: expected half of the rotated elements, 1..", head_dim / 2,
                  " for head_dim = ", head_dim);
  for (const auto& [table, name] : {std::pair{&tables.cos, "cos"}, {&tables.sin, "sin"}}) {
    call.add(table->view(), name);
    check_dtype(table->view(), name, {DType::kF32});
    check_last_axis_contiguous(table->view(), name);
  }
  SPECDEC_REQUIRE(c.strides[0] == tables.sin->strides[0] || c.shape[0] <= 1, "sin has row stride ",
                  tables.sin->strides[0], ", cos ", c.strides[0], ": both need the same layout");
  p->cos = static_cast<const float*>(c.data);
  p->sin = static_cast<const float*>(tables.sin->data);
  p->rope_row_stride = c.strides[0];
  p->max_positions = static_cast<std::int32_t>(c.shape[0]);
  p->rotary_dim = static_cast<std::int32_t>(c.shape[1] * 2);
  return tables;
}

void rope_append_kv(py::handle q, py::handle k, py::handle v, py::handle k_pages,
                    py::handle v_pages, py::handle page_table, py::handle kv_len,
                    py::handle cu_rows, py::handle positions, py::handle q_out, py::handle cos,
                    py::handle sin, bool interleaved, py::handle q_norm, py::handle k_norm,
                    float norm_eps, bool norm_plus_one, py::handle k_scale, py::handle v_scale,
                    py::handle max_rows, py::handle max_kv_len, const SumsArgument& sums,
                    const CallOptions& where) {
  SPECDEC_REQUIRE(std::isfinite(norm_eps) && norm_eps >= 0, "norm_eps = ", norm_eps,
                  ": give 0 or a positive number");
  OpCall call("rope_append_kv", where);
  const PagesArgument pages(call, k_pages, v_pages, false, true);
  const KvCacheView& cache = pages.view();
  const StepArgument step(
      call, {page_table, kv_len, cu_rows, py::none(), py::none(), max_rows, max_kv_len}, cache,
      packed_rows(call, k, "k"), kMaxDraftLen);
  const std::int64_t rows = step.view().num_rows;
  RopeAppendKvParams p;
  p.step = step.view();
  p.cache = cache;
  const BorrowedTensor where_rows =
      vector_argument(call, positions, "positions", DType::kI32, "[R]", rows);
  p.step.positions = static_cast<const std::int32_t*>(where_rows->data);
  const RowsArgument k_rows(call, k, "k", rows, cache.num_kv_heads, cache.head_dim);
  const RowsArgument v_rows(call, v, "v", rows, cache.num_kv_heads, cache.head_dim);
  p.dtype = k_rows.view().dtype;
  check_dtype(v_rows.view(), "v", {p.dtype});
  const BorrowedTensor shape(q, "q");
  check_shape(shape.view(), "q", "[R, H, K]", {rows, kAny, cache.head_dim});
  const std::int64_t heads = shape->shape[1];
  const RowsArgument q_rows(call, q, "q", rows, heads, cache.head_dim);
  check_dtype(q_rows.view(), "q", {p.dtype});
  const RowsArgument result(call, q_out, "q_out", rows, heads, cache.head_dim, true);
  check_dtype(result.view(), "q_out", {p.dtype});
  const RopeTables tables = rope_tables(call, cos, sin, &p);
  BorrowedTensor q_weight, k_weight;
  p.q_norm = norm_weight(call, q_norm, "q_norm", cache.head_dim, &q_weight, &p.norm_dtype);
  p.k_norm = norm_weight(call, k_norm, "k_norm", cache.head_dim, &k_weight, &p.norm_dtype);
  if (q_weight.defined() && k_weight.defined()) {
    check_dtype(k_weight.view(), "k_norm", {q_weight->dtype});
  }
  if (call.reads_values()) {
    for (std::int64_t r = 0; r < rows && p.rotary_dim > 0; ++r) {
      SPECDEC_REQUIRE(p.step.positions[r] >= 0 && p.step.positions[r] < p.max_positions,
                      "positions[", r, "] = ", p.step.positions[r], ": cos has positions 0..",
                      p.max_positions - 1);
    }
  }
  const ScalesArgument scales(call, k_scale, v_scale, cache);
  p.q = q_rows.view().data;
  p.k = k_rows.view().data;
  p.v = v_rows.view().data;
  p.q_out = result.view().data;
  p.q_row_stride = q_rows.row_stride();
  p.k_row_stride = k_rows.row_stride();
  p.v_row_stride = v_rows.row_stride();
  p.q_out_row_stride = result.row_stride();
  p.num_heads = static_cast<std::int32_t>(heads);
  if (sums) {
    const std::int64_t of_all = (heads + std::int64_t{2} * cache.num_kv_heads) * cache.head_dim;
    p.sums = (*sums)->use(call, rows, of_all, p.dtype);
  }
  p.interleaved = interleaved;
  p.norm_eps = norm_eps;
  p.norm_plus_one = norm_plus_one;
  p.k_scale = scales.k();
  p.v_scale = scales.v();
  p.scale_stride = scales.stride();
  p.exec = call.context(p.step.num_requests);
  if (rows == 0) return;
  call.run(&Backend::rope_append_kv, p);
}

// Paths widened to kMaxStepTokens columns, each checked.
std::vector<std::int32_t> checked_paths(const StepView& step, const TensorView& nodes,
                                        const std::int32_t* lengths) {
  const auto* from = static_cast<const std::int32_t*>(nodes.data);
  const std::int64_t width = nodes.shape[1];
  std::vector<std::int32_t> wide(static_cast<std::size_t>(step.num_requests) * kMaxStepTokens);
  for (std::int64_t b = 0; b < step.num_requests; ++b) {
    const int rows = step.cu_rows[b + 1] - step.cu_rows[b];
    const int drafts = std::max(rows - 1, 0);
    const std::int64_t most = std::min<std::int64_t>({width, drafts, kMaxDraftLen});
    SPECDEC_REQUIRE(lengths[b] >= 0 && lengths[b] <= most, "path_len[", b, "] = ", lengths[b],
                    ": request ", b, " has ", drafts, " drafts and path ", width,
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
  return wide;
}

void compact_kv(py::handle k_pages, py::handle v_pages, py::handle page_table, py::handle kv_len,
                py::handle cu_rows, py::handle path, py::handle path_len, py::handle num_rows,
                py::handle max_kv_len, const CallOptions& where) {
  OpCall call("compact_kv", where);
  const PagesArgument pages(call, k_pages, v_pages, true, true);
  const StepArgument step(
      call, {page_table, kv_len, cu_rows, py::none(), py::none(), py::none(), max_kv_len},
      pages.view(), num_rows.is_none() ? 0 : int_argument(num_rows, "num_rows"), kMaxDraftLen);
  const std::int64_t requests = step.view().num_requests;
  const BorrowedTensor nodes(path, "path");
  check_shape(nodes.view(), "path", "[B, max_path]", {requests, kAny});
  call.add(nodes.view(), "path");
  check_dtype(nodes.view(), "path", {DType::kI32});
  check_contiguous(nodes.view(), "path");
  const BorrowedTensor counts =
      vector_argument(call, path_len, "path_len", DType::kI32, "[B]", requests);
  CompactKvParams p;
  p.step = step.view();
  p.cache = pages.view();
  p.path_len = static_cast<const std::int32_t*>(counts->data);
  std::vector<std::int32_t> wide;
  if (call.reads_values()) {
    wide = checked_paths(p.step, nodes.view(), p.path_len);
    p.path = wide.data();
  } else {
    SPECDEC_REQUIRE(nodes->shape[1] == kMaxStepTokens, "path has ", nodes->shape[1],
                    " columns: on a device ", kMaxStepTokens, " are needed");
    p.path = static_cast<const std::int32_t*>(nodes->data);
  }
  p.exec = call.context(requests);
  call.run(&Backend::compact_kv, p);
}

}  // namespace

void register_kv(py::module_& m) {
  m.def(
      "append_kv",
      [](py::handle k, py::handle v, py::handle k_pages, py::handle v_pages, py::handle page_table,
         py::handle kv_len, py::handle cu_rows, py::handle k_scale, py::handle v_scale,
         py::handle max_rows, py::handle max_kv_len, py::object backend, std::uint64_t stream,
         py::object status) {
        const CallOptions where{std::move(backend), stream, py::none(), std::move(status)};
        OpCall call("append_kv", where);
        const PagesArgument pages(call, k_pages, v_pages, false, true);
        const StepArgument step(
            call, {page_table, kv_len, cu_rows, py::none(), py::none(), max_rows, max_kv_len},
            pages.view(), packed_rows(call, k, "k"), kMaxDraftLen);
        run_append(call, step.view(), pages.view(), 0, k, v, k_scale, v_scale);
      },
      py::arg("k"), py::arg("v"), py::arg("k_pages"), py::arg("v_pages"), py::arg("page_table"),
      py::arg("kv_len"), py::arg("cu_rows"), py::kw_only(), py::arg("k_scale") = py::none(),
      py::arg("v_scale") = py::none(), py::arg("max_rows") = py::none(),
      py::arg("max_kv_len") = py::none(), py::arg("backend") = py::none(), py::arg("stream") = 0,
      py::arg("status") = py::none(), "See specdec_ext.ops.append_kv.");
  m.def(
      "rope_append_kv",
      [](py::handle q, py::handle k, py::handle v, py::handle k_pages, py::handle v_pages,
         py::handle page_table, py::handle kv_len, py::handle cu_rows, py::handle positions,
         py::handle q_out, py::handle cos, py::handle sin, bool interleaved, py::handle q_norm,
         py::handle k_norm, float norm_eps, bool norm_plus_one, py::handle k_scale,
         py::handle v_scale, py::handle max_rows, py::handle max_kv_len, SumsArgument sums,
         py::object backend, std::uint64_t stream, py::object status) {
        const CallOptions where{std::move(backend), stream, py::none(), std::move(status)};
        rope_append_kv(q, k, v, k_pages, v_pages, page_table, kv_len, cu_rows, positions, q_out,
                       cos, sin, interleaved, q_norm, k_norm, norm_eps, norm_plus_one, k_scale,
                       v_scale, max_rows, max_kv_len, sums, where);
      },
      py::arg("q"), py::arg("k"), py::arg("v"), py::arg("k_pages"), py::arg("v_pages"),
      py::arg("page_table"), py::arg("kv_len"), py::arg("cu_rows"), py::arg("positions"),
      py::kw_only(), py::arg("q_out"), py::arg("cos") = py::none(), py::arg("sin") = py::none(),
      py::arg("interleaved") = false, py::arg("q_norm") = py::none(),
      py::arg("k_norm") = py::none(), py::arg("norm_eps") = 1e-6f, py::arg("norm_plus_one") = false,
      py::arg("k_scale") = py::none(), py::arg("v_scale") = py::none(),
      py::arg("max_rows") = py::none(), py::arg("max_kv_len") = py::none(),
      py::arg("sums") = py::none(), py::arg("backend") = py::none(), py::arg("stream") = 0,
      py::arg("status") = py::none(), "See specdec_ext.ops.rope_append_kv.");
  m.def(
      "compact_kv",
      [](py::handle k_pages, py::handle v_pages, py::handle page_table, py::handle kv_len,
         py::handle cu_rows, py::handle path, py::handle path_len, py::handle num_rows,
         py::handle max_kv_len, py::object backend, std::uint64_t stream, py::object status) {
        const CallOptions where{std::move(backend), stream, py::none(), std::move(status)};
        compact_kv(k_pages, v_pages, page_table, kv_len, cu_rows, path, path_len, num_rows,
                   max_kv_len, where);
      },
      py::arg("k_pages"), py::arg("v_pages"), py::arg("page_table"), py::arg("kv_len"),
      py::arg("cu_rows"), py::arg("path"), py::arg("path_len"), py::kw_only(),
      py::arg("num_rows") = py::none(), py::arg("max_kv_len") = py::none(),
      py::arg("backend") = py::none(), py::arg("stream") = 0, py::arg("status") = py::none(),
      "See specdec_ext.ops.compact_kv.");
  m.def(
      "step_append_kv",
      [](const StepPlan& plan, int layer, py::handle k, py::handle v, py::handle k_pages,
         py::handle v_pages, py::handle k_scale, py::handle v_scale) {
        const CallOptions where{py::str("cpu"), 0, py::none(), py::none()};
        OpCall call("step_append_kv", where);
        const PagesArgument pages(call, k_pages, v_pages, true, true);
        check_layer(layer, pages.view());
        const StepView step = plan.view();
        check_pages(step, pages.view(), "plan.");
        run_append(call, step, pages.view(), layer, k, v, k_scale, v_scale);
      },
      py::arg("plan"), py::arg("layer"), py::arg("k"), py::arg("v"), py::arg("k_pages"),
      py::arg("v_pages"), py::arg("k_scale") = py::none(), py::arg("v_scale") = py::none(),
      "See specdec_ext.ops.step_append_kv.");
}

}  // namespace specdec
