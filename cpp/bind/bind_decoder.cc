// _core.LlamaDecoder: the fused native decoder.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/cpu/decoder/llama_decoder.h"
#include "base/check.h"
#include "bind/decoder_object.h"
#include "bind/dlpack_convert.h"
#include "bind/registers.h"
#include "bind/weight_argument.h"
#include "engine/step_plan.h"

namespace py = pybind11;

namespace specdec {
namespace {

using cpu::Activation;
using cpu::DecoderConfig;
using cpu::LlamaDecoder;
using cpu::NamedTensor;

Activation parse_activation(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  SPECDEC_REQUIRE(name == "gelu_tanh", "activation = '", name, "': give 'silu' or 'gelu_tanh'");
  return Activation::kGeluTanh;
}

void set_layer(DecoderObject& self, int layer, const py::dict& tensors) {
  std::vector<std::unique_ptr<WeightArgument>> borrowed;
  std::vector<NamedTensor> named;
  for (const auto& item : tensors) {
    const auto name = item.first.cast<std::string>();
    borrowed.push_back(std::make_unique<WeightArgument>(item.second, name.c_str()));
    named.push_back({name, borrowed.back()->view()});
  }
  py::gil_scoped_release release;
  self.decoder.set_layer(layer, named);
}

template <void (LlamaDecoder::*kSet)(const cpu::WeightView&)>
void set_weight(DecoderObject& self, const py::object& weight) {
  const WeightArgument argument(weight, "weight");
  py::gil_scoped_release release;
  (self.decoder.*kSet)(argument.view());
}

void set_final_norm(DecoderObject& self, const py::object& weight) {
  const BorrowedTensor tensor(weight, "weight");
  check_cpu(tensor.view(), "weight");
  self.decoder.set_final_norm(tensor.view());
}

void bind_cache(DecoderObject& self, const py::object& k_pages, const py::object& v_pages,
                const py::object& k_scale, const py::object& v_scale) {
  BorrowedTensor k(k_pages, "k_pages", true), v(v_pages, "v_pages", true);
  std::optional<BorrowedTensor> k_scales, v_scales;
  if (!k_scale.is_none()) k_scales.emplace(k_scale, "k_scale");
  if (!v_scale.is_none()) v_scales.emplace(v_scale, "v_scale");
  self.decoder.bind_cache(k.view(), v.view(), k_scales ? &k_scales->view() : nullptr,
                          v_scales ? &v_scales->view() : nullptr);
  self.k_pages = std::move(k);
  self.v_pages = std::move(v);
}

void set_taps(DecoderObject& self, std::vector<int> layers, const py::object& rows) {
  if (layers.empty()) {
    self.decoder.set_taps({}, nullptr);
    self.taps = {};
    return;
  }
  BorrowedTensor tensor(rows, "rows", true);
  const cpu::DecoderConfig& config = self.decoder.config();
  check_cpu(tensor.view(), "rows");
  check_contiguous(tensor.view(), "rows");
  check_dtype(tensor.view(), "rows", {DType::kF32});
  check_shape(tensor.view(), "rows", "[max_rows, layers * hidden_size]",
              {config.max_rows, static_cast<std::int64_t>(layers.size()) * config.hidden_size});
  self.decoder.set_taps(std::move(layers), static_cast<float*>(tensor->data));
  self.taps = std::move(tensor);
}

void forward(DecoderObject& self, const StepPlan& plan, const py::object& out,
             const py::object& hidden, const py::object& best) {
  const BorrowedTensor tensor(out, "out", true);
  check_cpu(tensor.view(), "out");
  check_contiguous(tensor.view(), "out");
  check_dtype(tensor.view(), "out", {DType::kI32, DType::kF32});
  const bool ids = tensor->dtype == DType::kI32;
  if (ids) {
    check_shape(tensor.view(), "out", "[L]", {plan.num_logit_rows});
  } else {
    check_shape(tensor.view(), "out", "[L, V]",
                {plan.num_logit_rows, self.decoder.config().head_size});
  }
  std::optional<BorrowedTensor> states;
  float* hidden_data = nullptr;
  if (!hidden.is_none()) {
    states.emplace(hidden, "hidden", true);
    const TensorView& view = states->view();
    check_cpu(view, "hidden");
    check_contiguous(view, "hidden");
    check_dtype(view, "hidden", {DType::kF32});
    check_shape(view, "hidden", "[L, hidden_size]",
                {plan.num_logit_rows, self.decoder.config().hidden_size});
    hidden_data = static_cast<float*>(view.data);
  }
  TokenId* best_ids = nullptr;
  std::optional<BorrowedTensor> found;
  if (!best.is_none()) {
    SPECDEC_REQUIRE(!ids, "best: out has the ids already; give it beside scores");
    found.emplace(best, "best", true);
    check_cpu(found->view(), "best");
    check_contiguous(found->view(), "best");
    check_dtype(found->view(), "best", {DType::kI32});
    check_shape(found->view(), "best", "[L]", {plan.num_logit_rows});
    best_ids = static_cast<TokenId*>(found->view().data);
  }
  const StepView step = plan.view();
  py::gil_scoped_release release;
  if (ids) {
    self.decoder.forward_ids(step, static_cast<TokenId*>(tensor->data), hidden_data);
  } else {
    self.decoder.forward_logits(step, static_cast<float*>(tensor->data), hidden_data, best_ids);
  }
}

void embed(const DecoderObject& self, const py::object& tokens, const py::object& out) {
  const BorrowedTensor ids(tokens, "tokens");
  check_cpu(ids.view(), "tokens");
  check_contiguous(ids.view(), "tokens");
  check_dtype(ids.view(), "tokens", {DType::kI32});
  const BorrowedTensor rows(out, "out", true);
  check_cpu(rows.view(), "out");
  check_contiguous(rows.view(), "out");
  check_dtype(rows.view(), "out", {DType::kF32});
  check_shape(ids.view(), "tokens", "[n]", {ids->numel()});
  check_shape(rows.view(), "out", "[n, hidden_size]",
              {ids->numel(), self.decoder.config().hidden_size});
  self.decoder.embedding_rows(static_cast<const TokenId*>(ids->data), ids->numel(),
                              static_cast<float*>(rows->data));
}

void score_rows(DecoderObject& self, const py::object& hidden, const py::object& out) {
  const BorrowedTensor rows(hidden, "hidden"), scores(out, "out", true);
  const DecoderConfig& config = self.decoder.config();
  for (const auto& [tensor, name] : {std::pair{&rows, "hidden"}, std::pair{&scores, "out"}}) {
    check_cpu(tensor->view(), name);
    check_contiguous(tensor->view(), name);
    check_dtype(tensor->view(), name, {DType::kF32});
  }
  check_shape(rows.view(), "hidden", "[n, hidden_size]", {kAny, config.hidden_size});
  check_shape(scores.view(), "out", "[n, V]", {rows->shape[0], config.head_size});
  if (rows->shape[0] == 0) return;
  py::gil_scoped_release release;
  self.decoder.score_rows(static_cast<const float*>(rows->data), rows->shape[0],
                          static_cast<float*>(scores->data));
}

void unpack_head_rows(const DecoderObject& self, const py::object& ids, const py::object& out) {
  const BorrowedTensor rows(ids, "ids"), values(out, "out", true);
  check_cpu(rows.view(), "ids");
  check_contiguous(rows.view(), "ids");
  check_dtype(rows.view(), "ids", {DType::kI32});
  check_shape(rows.view(), "ids", "[n]", {kAny});
  check_cpu(values.view(), "out");
  check_contiguous(values.view(), "out");
  check_dtype(values.view(), "out", {DType::kF32});
  check_shape(values.view(), "out", "[n, hidden_size]",
              {rows->shape[0], self.decoder.config().hidden_size});
  py::gil_scoped_release release;
  self.decoder.unpack_head_rows(static_cast<const TokenId*>(rows->data), rows->shape[0],
                                static_cast<float*>(values->data));
}

constexpr const char* kClassDoc =
    R"(A decoder of the Llama shape: all rows of a step in one call, one parallel region.

Runs Llama, Vicuna, Mistral, Qwen2, Qwen3, SmolLM3, Gemma 2 and Gemma 3 (text) checkpoints in
float32, bfloat16, float16 or GGUF's block formats, each weight in its own. Norms, attention and activations are float32; a row's bits depend on its
own path alone. Every setter copies. Raises ValueError naming the field or the tensor.)";

constexpr const char* kForwardDoc = R"(Run the rows of ``plan`` and append their K/V to the pages.

Parameters
----------
plan : StepPlan
out : tensor, contiguous
    int32 [L]: the greedy ids of the logit rows (first largest score, -1 for a row with a NaN).
    float32 [L, V]: their scores.
hidden : tensor float32 [L, hidden_size], contiguous, optional
    Receives the head's input of each logit row: the final norm's output.
best : tensor int32 [L], contiguous, optional
    Beside scores: receives the greedy ids.

Releases the GIL. One call at a time per decoder.)";

constexpr const char* kSetLayerDoc = R"(Give layer ``layer`` its weights, by checkpoint name.

``tensors`` maps names without ``model.layers.<i>.``, e.g. ``self_attn.q_proj.weight`` [H*K, hidden],
to weights as PackedLinear takes them. Weights that read the same input (q, k, v; gate, up) are all
quantised or all of one dtype. Projection biases are optional.)";

}  // namespace

void register_decoder(py::module_& m) {
  py::class_<DecoderObject>(m, "LlamaDecoder", kClassDoc)
      .def(
          py::init([](int vocab_size, int hidden_size, int intermediate_size, int num_layers,
                      int num_heads, int num_kv_heads, int head_dim, int max_rows, int max_position,
                      float rms_norm_eps, const std::string& activation, float attention_scale,
                      float attention_softcap, float final_softcap, float embedding_scale,
                      float norm_offset, bool has_qk_norm, bool has_sandwich_norms,
                      bool tie_word_embeddings, std::vector<int> rope_index,
                      std::vector<int> sliding_window, int head_size, int shard_rank,
                      std::vector<int> kv_head_bounds, std::vector<int> hidden_bounds,
                      std::vector<int> ffn_bounds, std::vector<int> head_bounds, int sink_tokens,
                      bool adds_partial_sums, bool has_fast_forms) {
            DecoderConfig c;
            c.vocab_size = vocab_size;
            c.head_size = head_size;
            c.hidden_size = hidden_size;
            c.intermediate_size = intermediate_size;
            c.num_layers = num_layers;
            c.num_heads = num_heads;
            c.num_kv_heads = num_kv_heads;
            c.head_dim = head_dim;
            c.max_rows = max_rows;
            c.max_position = max_position;
            c.rms_norm_eps = rms_norm_eps;
            c.activation = parse_activation(activation);
            c.attention_scale = attention_scale;
            c.attention_softcap = attention_softcap;
            c.final_softcap = final_softcap;
            c.embedding_scale = embedding_scale;
            c.norm_offset = norm_offset;
            c.has_qk_norm = has_qk_norm;
            c.has_sandwich_norms = has_sandwich_norms;
            c.tie_word_embeddings = tie_word_embeddings;
            c.rope_index = std::move(rope_index);
            c.sliding_window = std::move(sliding_window);
            c.sink_tokens = sink_tokens;
            c.shard_rank = shard_rank;
            c.kv_head_bounds = std::move(kv_head_bounds);
            c.hidden_bounds = std::move(hidden_bounds);
            c.ffn_bounds = std::move(ffn_bounds);
            c.head_bounds = std::move(head_bounds);
            c.adds_partial_sums = adds_partial_sums;
            c.has_fast_forms = has_fast_forms;
            return std::make_unique<DecoderObject>(std::move(c));
          }),
          py::kw_only(), py::arg("vocab_size"), py::arg("hidden_size"),
          py::arg("intermediate_size"), py::arg("num_layers"), py::arg("num_heads"),
          py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("max_rows"),
          py::arg("max_position"), py::arg("rms_norm_eps"), py::arg("activation"),
          py::arg("attention_scale"), py::arg("attention_softcap") = 0.0f,
          py::arg("final_softcap") = 0.0f, py::arg("embedding_scale") = 1.0f,
          py::arg("norm_offset") = 0.0f, py::arg("has_qk_norm") = false,
          py::arg("has_sandwich_norms") = false, py::arg("tie_word_embeddings") = false,
          py::arg("rope_index"), py::arg("sliding_window"), py::arg("head_size") = 0,
          py::arg("shard_rank") = 0, py::arg("kv_head_bounds") = std::vector<int>{},
          py::arg("hidden_bounds") = std::vector<int>{}, py::arg("ffn_bounds") = std::vector<int>{},
          py::arg("head_bounds") = std::vector<int>{}, py::arg("sink_tokens") = 0,
          py::arg("adds_partial_sums") = false, py::arg("has_fast_forms") = false,
          "Fields as in config.json; ``rope_index`` and ``sliding_window`` have one entry per "
          "layer (table index or -1; tokens or 0). ``sink_tokens``: of a text's start that layers "
          "with a window see besides. ``max_rows`` sizes the buffers. ``head_size``: "
          "rows of the head if they are not the whole vocabulary. With bounds [ranks + 1] it "
          "computes "
          "the rows of each projection that lie between those of ``shard_rank``; with "
          "``adds_partial_sums`` the output and the down projection have all rows, of the columns "
          "that this rank computes, and the ranks' sums are added up. ``has_fast_forms``: passes "
          "of many rows multiply quantised weights as bfloat16, and attention "
          "rounds to it, where that is faster (processors with tiles), so a row's bits depend on "
          "how many rows a pass has; not for a shard.")
      .def("set_embedding", &set_weight<&LlamaDecoder::set_embedding>, py::arg("weight"),
           "weight [V, hidden]; with tied embeddings it is the head as well.")
      .def("set_head", &set_weight<&LlamaDecoder::set_head>, py::arg("weight"),
           "weight [head_size, hidden].")
      .def("set_final_norm", &set_final_norm, py::arg("weight"), "weight [hidden].")
      .def(
          "set_rope",
          [](DecoderObject& self, int index, const py::object& cos, const py::object& sin) {
            const BorrowedTensor c(cos, "cos"), s(sin, "sin");
            check_cpu(c.view(), "cos");
            check_cpu(s.view(), "sin");
            self.decoder.set_rope(index, c.view(), s.view());
          },
          py::arg("index"), py::arg("cos"), py::arg("sin"),
          "Rotary table: cos and sin float32 [>= max_position, rotary_dim / 2].")
      .def("set_layer", &set_layer, py::arg("layer"), py::arg("tensors"), kSetLayerDoc)
      .def(
          "bind_cache", &bind_cache, py::arg("k_pages"), py::arg("v_pages"),
          py::arg("k_scale") = py::none(), py::arg("v_scale") = py::none(),
          "Use these pages [layers, P, G, S, kv_row_width(dtype, K)] from now on; keeps them "
          "alive. "
          "All weights must be set. k_scale, v_scale: float32 [layers, G], copied; what e4m3 pages "
          "hold times these is K and V; None: 1.")
      .def("set_taps", &set_taps, py::arg("layers"), py::arg("rows"),
           "From now on forward() leaves the residual stream of its rows, as it enters each of "
           "these layers (num_layers: as it leaves the last), in ``rows`` float32 [max_rows, "
           "len(layers) * hidden_size]; keeps it alive. No layers, rows None: nothing is left.")
      .def("forward", &forward, py::arg("plan"), py::arg("out"), py::arg("hidden") = py::none(),
           py::arg("best") = py::none(), kForwardDoc)
      .def("embed", &embed, py::arg("tokens"), py::arg("out"),
           "Rows of the input embedding table as stored (no model's scale on them): tokens int32 "
           "[n], out float32 [n, hidden_size].")
      .def("score_rows", &score_rows, py::arg("hidden"), py::arg("out"),
           "Write the output head's scores of ``hidden`` float32 [n, hidden_size] into ``out`` "
           "float32 [n, V]: for rows that forward() gave as hidden, the bits of its scores.")
      .def("unpack_head_rows", &unpack_head_rows, py::arg("ids"), py::arg("out"),
           "Write rows ``ids`` int32 [n] of the output head's weight into ``out`` float32 "
           "[n, hidden_size].")
      .def(
          "read_weights",
          [](const DecoderObject& self) {
            py::gil_scoped_release release;
            return self.decoder.read_weights();
          },
          "Read the packed weights as a greedy step does and do nothing else: the floor of "
          "``forward``. Returns a checksum.")
      .def_property_readonly(
          "weight_bytes", [](const DecoderObject& self) { return self.decoder.weight_bytes(); },
          "Bytes of packed weights that a step reads.")
      .def_property_readonly(
          "has_fast_forms", [](const DecoderObject& self) { return self.decoder.has_fast_forms(); },
          "Whether passes of many rows multiply other forms of their inputs than short ones.")
      .def_property_readonly(
          "buffer_bytes", [](const DecoderObject& self) { return self.decoder.buffer_bytes(); },
          "Bytes of the buffers between layers (after bind_cache).");
}

}  // namespace specdec
