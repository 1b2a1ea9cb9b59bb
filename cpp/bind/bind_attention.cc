// Speculative attention on tensors. Conversion and checks here, arithmetic in the backends.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <optional>
#include <string>

#include "backend/attention/pick.h"
#include "backend/cpu/attention/cpu_attention.h"
#include "backend/step_check.h"
#include "base/check.h"
#include "bind/op_arguments.h"
#include "bind/registers.h"
#include "engine/step_plan.h"

namespace py = pybind11;

namespace specdec {
namespace {

// What attention computes, besides the tensors.
struct AttentionOptions {
  float scale = 1.0f;
  int sliding_window = 0;
  float softcap = 0.0f;
  py::handle sinks, k_scale, v_scale;
  bool exact = true;
  int max_depth = kMaxDraftLen;
  const char* instance = nullptr;
  bool reuse_plan = false;
  int sink_tokens = 0, first_key = 0;
};

void check_options(const AttentionOptions& o) {
  SPECDEC_REQUIRE(std::isfinite(o.scale), "scale = ", o.scale, ": give a finite number");
  SPECDEC_REQUIRE(o.sliding_window >= 0, "sliding_window = ", o.sliding_window,
                  ": give 0 (none) or a positive number of tokens");
  SPECDEC_REQUIRE(o.sink_tokens >= 0, "sink_tokens = ", o.sink_tokens,
                  ": give 0 (none) or a positive number of tokens");
  SPECDEC_REQUIRE(o.first_key == 0 || (o.first_key > 0 && o.sink_tokens == 0),
                  "first_key = ", o.first_key, ", sink_tokens = ", o.sink_tokens,
                  ": give 0 for one of them, and a position of 0 or more");
  SPECDEC_REQUIRE(std::isfinite(o.softcap) && o.softcap >= 0, "softcap = ", o.softcap,
                  ": give 0 (none) or a positive number");
  SPECDEC_REQUIRE(o.max_depth >= 0 && o.max_depth <= kMaxDraftLen, "max_depth = ", o.max_depth,
                  ": give 0..", kMaxDraftLen);
}

void run_attention(OpCall& call, const StepView& step, const KvCacheView& cache, int layer,
                   py::handle q, py::handle out, const AttentionOptions& options) {
  SPECDEC_REQUIRE(step.is_tree != nullptr, "is_tree is None: backend \"", call.backend().name,
                  "\" reads it on its device, [B] = [", step.num_requests, "] uint8");
  const BorrowedTensor shape(q, "q");
  check_shape(shape.view(), "q", "[R, H, K]", {step.num_rows, kAny, cache.head_dim});
  const std::int64_t heads = shape->shape[1];
  SPECDEC_REQUIRE(heads >= 1 && heads % cache.num_kv_heads == 0, "q has ", heads,
                  " heads: a multiple of the ", cache.num_kv_heads, " KV heads is needed");
  const RowsArgument rows(call, q, "q", step.num_rows, heads, cache.head_dim);
  const RowsArgument result(call, out, "out", step.num_rows, heads, cache.head_dim, true);
  check_dtype(result.view(), "out", {rows.view().dtype});
  SpecAttentionParams p;
  BorrowedTensor sinks;
  if (!options.sinks.is_none()) {
    sinks = vector_argument(call, options.sinks, "sinks", DType::kF32, "[H]", heads);
    p.sinks = static_cast<const float*>(sinks->data);
  }
  const ScalesArgument scales(call, options.k_scale, options.v_scale, cache);
  p.step = step;
  p.cache = cache;
  p.layer = layer;
  p.q = rows.view().data;
  p.out = result.view().data;
  p.q_row_stride = rows.row_stride();
  p.out_row_stride = result.row_stride();
  p.num_heads = static_cast<std::int32_t>(heads);
  p.dtype = rows.view().dtype;
  p.scale = options.scale;
  p.sliding_window = options.sliding_window;
  p.sink_tokens = options.sink_tokens;
  p.first_key = options.first_key;
  p.softcap = options.softcap;
  p.k_scale = scales.k();
  p.v_scale = scales.v();
  p.scale_stride = scales.stride();
  p.exact = options.exact;
  p.max_depth = options.max_depth;
  p.instance = options.instance;
  p.reuse_plan = options.reuse_plan;
  const Backend& backend = call.backend();
  SPECDEC_REQUIRE(p.instance == nullptr || backend.limits != nullptr, "instance = \"", p.instance,
                  "\": backend \"", backend.name, "\" has one kernel for all");
  if (backend.limits == nullptr) {
    for (std::int32_t b = 0; b < step.num_requests; ++b) {
      SPECDEC_REQUIRE(step.kv_len[b] >= p.first_key || step.cu_rows[b] == step.cu_rows[b + 1],
                      "kv_len[", b, "] = ", step.kv_len[b],
                      ": rows lie at first_key = ", p.first_key, " or behind it");
    }
  }
  if (step.num_rows == 0) return;
  std::int64_t scratch = 0;
  if (backend.limits != nullptr) {
    const DeviceLimits limits = backend.limits(call.device_index());
    scratch =
        attention::plan_workspace(attention::problem_of(p), limits, p.instance).layout.total_bytes;
  }
  p.exec = call.context(step.num_requests, scratch);
  if (p.reuse_plan) call.settle_all_but("q");
  call.run(&Backend::spec_attention, p);
}

std::int64_t packed_rows(py::handle tensor, const char* name) {
  const BorrowedTensor t(tensor, name);
  check_shape(t.view(), name, "[R, H, K]", {kAny, kAny, kAny});
  return t->shape[0];
}

}  // namespace

void register_attention(py::module_& m) {
  m.def(
      "has_fast_attention",
      [](const std::string& kv_dtype, std::int64_t head_dim) {
        // Names of types that no kernel multiplies in bfloat16 need not be known.
        return kv_dtype == dtype_name(DType::kBF16) &&
               cpu::has_fast_attention(DType::kBF16, head_dim);
      },
      py::arg("kv_dtype"), py::arg("head_dim"),
      "Whether attention on the CPU with ``exact=False`` ever has other bits than with "
      "``exact=True``: "
      "it multiplies bfloat16 K/V as such, where a processor has instructions for that.");
  m.def(
      "spec_attention",
      [](py::handle q, py::handle k_pages, py::handle v_pages, py::handle page_table,
         py::handle kv_len, py::handle cu_rows, py::handle mask, py::handle is_tree, py::handle out,
         float scale, int sliding_window, float softcap, py::handle sinks, py::handle k_scale,
         py::handle v_scale, bool exact, int max_depth, py::handle max_rows, py::handle max_kv_len,
         const std::optional<std::string>& instance, bool reuse_plan, py::object backend,
         std::uint64_t stream, py::object workspace, py::object status, int sink_tokens,
         int first_key) {
        const CallOptions where{std::move(backend), stream, std::move(workspace),
                                std::move(status)};
        const AttentionOptions options{
            scale,      sliding_window, softcap,
            sinks,      k_scale,        v_scale,
            exact,      max_depth,      instance ? instance->c_str() : nullptr,
            reuse_plan, sink_tokens,    first_key};
        check_options(options);
        OpCall call("spec_attention", where);
        const PagesArgument pages(call, k_pages, v_pages, false, false);
        const StepArgument step(
            call, {page_table, kv_len, cu_rows, mask, is_tree, max_rows, max_kv_len}, pages.view(),
            call.reads_values() ? 0 : packed_rows(q, "q"), max_depth);
        run_attention(call, step.view(), pages.view(), 0, q, out, options);
      },
      py::arg("q"), py::arg("k_pages"), py::arg("v_pages"), py::arg("page_table"),
      py::arg("kv_len"), py::arg("cu_rows"), py::kw_only(), py::arg("mask") = py::none(),
      py::arg("is_tree") = py::none(), py::arg("out"), py::arg("scale"),
      py::arg("sliding_window") = 0, py::arg("softcap") = 0.0f, py::arg("sinks") = py::none(),
      py::arg("k_scale") = py::none(), py::arg("v_scale") = py::none(), py::arg("exact") = true,
      py::arg("max_depth") = kMaxDraftLen, py::arg("max_rows") = py::none(),
      py::arg("max_kv_len") = py::none(), py::arg("instance") = py::none(),
      py::arg("reuse_plan") = false, py::arg("backend") = py::none(), py::arg("stream") = 0,
      py::arg("workspace") = py::none(), py::arg("status") = py::none(), py::arg("sink_tokens") = 0,
      py::arg("first_key") = 0, "See specdec_ext.ops.spec_attention.");
  m.def(
      "step_attention",
      [](const StepPlan& plan, int layer, py::handle q, py::handle out, py::handle k_pages,
         py::handle v_pages, float scale, int sliding_window, float softcap, py::handle sinks,
         py::handle k_scale, py::handle v_scale, int sink_tokens) {
        const CallOptions where{py::str("cpu"), 0, py::none(), py::none()};
        AttentionOptions options{scale, sliding_window, softcap, sinks, k_scale, v_scale};
        options.sink_tokens = sink_tokens;
        check_options(options);
        OpCall call("step_attention", where);
        const PagesArgument pages(call, k_pages, v_pages, true, false);
        check_layer(layer, pages.view());
        const StepView step = plan.view();
        check_pages(step, pages.view(), "plan.");
        run_attention(call, step, pages.view(), layer, q, out, options);
      },
      py::arg("plan"), py::arg("layer"), py::arg("q"), py::arg("out"), py::arg("k_pages"),
      py::arg("v_pages"), py::arg("scale"), py::arg("sliding_window") = 0,
      py::arg("softcap") = 0.0f, py::arg("sinks") = py::none(), py::arg("k_scale") = py::none(),
      py::arg("v_scale") = py::none(), py::arg("sink_tokens") = 0,
      "See specdec_ext.ops.step_attention.");
}

}  // namespace specdec
