// _core.Eagle3Head: an EAGLE-3 head over packed linear layers, beside a native target.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "backend/cpu/drafter/eagle_head.h"
#include "base/check.h"
#include "bind/drafter_arguments.h"
#include "bind/op_arguments.h"
#include "bind/registers.h"
#include "engine/step_plan.h"

namespace py = pybind11;

namespace specdec {
namespace {

using cpu::EagleHead;
using cpu::EagleLayers;
using cpu::EagleShape;

constexpr std::int64_t kMaxEagleWidth = 1 << 24;

// The head, the Python objects that its layers live in, and the pages that it points into.
struct EagleHeadObject {
  std::vector<py::object> kept;
  std::unique_ptr<EagleHead> head;
  BorrowedTensor k_pages, v_pages, features;
};

std::vector<float> floats_argument(const py::object& values, const char* name) {
  const BorrowedTensor tensor(values, name);
  check_cpu(tensor.view(), name);
  check_contiguous(tensor.view(), name);
  check_dtype(tensor.view(), name, {DType::kF32});
  const auto* first = static_cast<const float*>(tensor->data);
  return {first, first + tensor.view().numel()};
}

EagleHead::EmbedRows embedding_of(const py::object& embedding, std::int64_t hidden_size) {
  if (py::isinstance<cpu::PackedLinear>(embedding)) {
    const cpu::PackedLinear* table = layer_argument(embedding, "embedding");
    SPECDEC_REQUIRE(table->k() == hidden_size, "embedding has rows of ", table->k(),
                    " values, expected hidden_size = ", hidden_size);
    return [=](const TokenId* tokens, std::int64_t count, float* out) {
      for (std::int64_t i = 0; i < count; ++i) {
        SPECDEC_REQUIRE(tokens[i] >= 0 && tokens[i] < table->n(), "tokens[", i, "] = ", tokens[i],
                        ": the embedding has ", table->n(), " rows");
        table->unpack_row(tokens[i], out + i * hidden_size);
      }
    };
  }
  const auto* decoder = &target_argument(embedding).decoder;
  SPECDEC_REQUIRE(decoder->config().hidden_size == hidden_size,
                  "embedding: the decoder's hidden_size is ", decoder->config().hidden_size,
                  ", expected ", hidden_size);
  return [=](const TokenId* tokens, std::int64_t count, float* out) {
    decoder->embedding_rows(tokens, count, out);
  };
}

std::unique_ptr<EagleHeadObject> make_eagle_head(
    std::int64_t hidden_size, std::int64_t tap_size, std::int64_t num_scores, int num_heads,
    int num_kv_heads, int head_dim, float rms_norm_eps, bool norm_before_residual,
    int sliding_window, const py::object& fc, const py::object& qkv, const py::object& o,
    const py::object& gate_up, const py::object& down, const py::object& head,
    const py::object& input_norm, const py::object& feature_norm, const py::object& ffn_norm,
    const py::object& final_norm, const py::object& cos, const py::object& sin,
    const py::object& embedding) {
  for (const auto& [value, name] : {std::pair{hidden_size, "hidden_size"},
                                    {tap_size, "tap_size"},
                                    {num_scores, "num_scores"}}) {
    SPECDEC_REQUIRE(value >= 1 && value <= kMaxEagleWidth, name, " = ", value, ": give 1..",
                    kMaxEagleWidth);
  }
  auto self = std::make_unique<EagleHeadObject>();
  self->kept = {fc, qkv, o, gate_up, down, head, embedding};
  EagleShape shape;
  shape.hidden_size = hidden_size;
  shape.tap_size = tap_size;
  shape.num_scores = num_scores;
  shape.num_heads = num_heads;
  shape.num_kv_heads = num_kv_heads;
  shape.head_dim = head_dim;
  shape.rms_norm_eps = rms_norm_eps;
  shape.norm_before_residual = norm_before_residual;
  SPECDEC_REQUIRE(sliding_window >= 0, "sliding_window = ", sliding_window, ": tokens, 0 for all");
  shape.sliding_window = sliding_window;
  EagleLayers layers;
  layers.fc = layer_argument(fc, "fc");
  layers.qkv = layer_argument(qkv, "qkv");
  layers.o = layer_argument(o, "o");
  layers.gate_up = layer_argument(gate_up, "gate_up");
  layers.down = layer_argument(down, "down");
  layers.head = layer_argument(head, "head");
  layers.input_norm = floats_argument(input_norm, "input_norm");
  layers.feature_norm = floats_argument(feature_norm, "feature_norm");
  layers.ffn_norm = floats_argument(ffn_norm, "ffn_norm");
  layers.final_norm = floats_argument(final_norm, "final_norm");
  layers.cos = floats_argument(cos, "cos");
  layers.sin = floats_argument(sin, "sin");
  self->head =
      std::make_unique<EagleHead>(shape, std::move(layers), embedding_of(embedding, hidden_size));
  return self;
}

void bind_head_pages(EagleHeadObject& self, const py::object& k_pages, const py::object& v_pages,
                     const py::object& features) {
  BorrowedTensor k(k_pages, "k_pages", true), v(v_pages, "v_pages", true);
  BorrowedTensor states(features, "features", true);
  self.head->bind_cache(k.view(), v.view(), states.view());
  self.k_pages = std::move(k);
  self.v_pages = std::move(v);
  self.features = std::move(states);
}

void keep_features(EagleHeadObject& self, const StepPlan& plan, int num_prompts,
                   const SlotLayout& layout, py::handle slots, const py::object& taps) {
  CallOptions where{py::str("cpu"), 0, py::none(), py::none()};
  OpCall call("Eagle3Head.keep", where);
  const SlotsArgument pool(call, layout, slots);
  const BorrowedTensor rows(taps, "taps");
  check_cpu(rows.view(), "taps");
  check_contiguous(rows.view(), "taps");
  check_dtype(rows.view(), "taps", {DType::kF32});
  check_shape(rows.view(), "taps", "[max_rows, tap_size]", {kAny, self.head->shape().tap_size});
  SPECDEC_REQUIRE(rows->shape[0] >= plan.num_rows, "taps has ", rows->shape[0],
                  " rows, the plan has ", plan.num_rows);
  SPECDEC_REQUIRE(num_prompts >= 0 && num_prompts <= plan.num_requests,
                  "num_prompts = ", num_prompts, ": the plan has ", plan.num_requests, " requests");
  const StepView step = plan.view();
  const py::gil_scoped_release release;
  self.head->keep(step, num_prompts, plan.slot.data(), pool.view(),
                  static_cast<const float*>(rows->data));
}

void run_rows(EagleHeadObject& self, const StepPlan& plan, py::handle sources,
              const py::object& out) {
  const BorrowedTensor from(sources, "sources");
  check_cpu(from.view(), "sources");
  check_contiguous(from.view(), "sources");
  check_dtype(from.view(), "sources", {DType::kI32});
  check_shape(from.view(), "sources", "[R]", {plan.num_rows});
  BorrowedTensor scores;
  if (!out.is_none()) {
    scores = BorrowedTensor(out, "out", true);
    check_cpu(scores.view(), "out");
    check_contiguous(scores.view(), "out");
    check_dtype(scores.view(), "out", {DType::kF32});
    check_shape(scores.view(), "out", "[L, num_scores]",
                {plan.num_logit_rows, self.head->shape().num_scores});
  }
  const StepView step = plan.view();
  const py::gil_scoped_release release;
  self.head->forward(step, static_cast<const std::int32_t*>(from->data),
                     out.is_none() ? nullptr : static_cast<float*>(scores->data));
}

constexpr const char* kDoc = R"(An EAGLE-3 head: one decoder layer on the target's own states.

Layers are PackedLinear: ``fc`` [H, tap_size], ``qkv`` [(heads + 2 kv heads) * head_dim, 2H], ``o``,
``gate_up`` [2 * intermediate, H], ``down``, ``head`` [num_scores, H]; norms float32 [H]; ``cos``,
``sin`` float32 [positions, head_dim / 2]. ``embedding``: a PackedLinear [vocab, H], or the target's
LlamaDecoder. Raises ValueError naming the layer that does not fit.)";

}  // namespace

void register_eagle_head(py::module_& m) {
  py::class_<EagleHeadObject>(m, "Eagle3Head", kDoc)
      .def(py::init(&make_eagle_head), py::kw_only(), py::arg("hidden_size"), py::arg("tap_size"),
           py::arg("num_scores"), py::arg("num_heads"), py::arg("num_kv_heads"),
           py::arg("head_dim"), py::arg("rms_norm_eps"), py::arg("norm_before_residual"),
           py::arg("sliding_window"), py::arg("fc"), py::arg("qkv"), py::arg("o"),
           py::arg("gate_up"), py::arg("down"), py::arg("head"), py::arg("input_norm"),
           py::arg("feature_norm"), py::arg("ffn_norm"), py::arg("final_norm"), py::arg("cos"),
           py::arg("sin"), py::arg("embedding"))
      .def("bind_cache", &bind_head_pages, py::arg("k_pages"), py::arg("v_pages"),
           py::arg("features"),
           "Pages with the ids of the target's: K and V [1, P, G, S, K], features float32 [P, S, "
           "H]; kept alive.")
      .def("keep", &keep_features, py::arg("plan"), py::arg("num_prompts"), py::arg("layout"),
           py::arg("slots"), py::arg("taps"),
           "Behind the commit of ``plan``, whose first ``num_prompts`` requests are prompts: keeps "
           "the features of the rows that are part of their texts now. ``taps`` float32 [>= R, "
           "tap_size]: the target's states by row (LlamaDecoder.set_taps). Releases the GIL.")
      .def("forward", &run_rows, py::arg("plan"), py::arg("sources"), py::arg("out"),
           "Runs the rows of ``plan``. ``sources`` int32 [R]: the row of the call before whose "
           "result is the row's feature, -1: the feature in the pages. ``out`` float32 [L, "
           "num_scores], or None: K/V alone. Releases the GIL.")
      .def_property_readonly(
          "num_kept", [](const EagleHeadObject& self) { return self.head->num_kept(); },
          "Features that keep() has made.")
      .def_property_readonly(
          "weight_bytes", [](const EagleHeadObject& self) { return self.head->weight_bytes(); },
          "Bytes of packed weights.");
}

}  // namespace specdec
