// LlamaDecoder: configuration, weights and buffers. What a step does is in llama_decoder.cc.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "backend/cpu/decoder/decoder_parts.h"
#include "backend/cpu/decoder/llama_decoder.h"
#include "backend/cpu/half.h"
#include "base/check.h"
#include "base/pages.h"

namespace specdec::cpu {
namespace {

// Longer blocks go through the FFN in pieces: by then the work is compute-bound, and the widest
// buffers of the model stay small.
constexpr std::int64_t kMaxFfnRows = 512;

float element(const TensorView& view, std::int64_t offset) {
  if (view.dtype == DType::kF32) return static_cast<const float*>(view.data)[offset];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(view.data)[offset];
  return view.dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

void check_matrix(const WeightView& weight, const std::string& name, std::int64_t rows,
                  std::int64_t columns) {
  const TensorView& view = weight.view;
  const bool is_matrix = view.ndim == 2;
  SPECDEC_REQUIRE(is_matrix && view.shape[0] == rows && weight.columns() == columns, name,
                  ": shape must be [", rows, ", ", columns, "], got ", view.ndim, " dimensions [",
                  view.ndim > 0 ? view.shape[0] : 0, ", ", is_matrix ? weight.columns() : 0,
                  "]: weights and config.json do not belong together");
}

// The tensors of a layer by name; notices the ones nobody asked for.
class TensorMap {
 public:
  TensorMap(int layer, const std::vector<NamedTensor>& tensors)
      : prefix_("layers." + std::to_string(layer) + ".") {
    for (const NamedTensor& tensor : tensors) {
      const bool is_new = tensors_.emplace(tensor.name, &tensor.weight).second;
      SPECDEC_REQUIRE(is_new, path(tensor.name), ": given twice");
    }
  }
  std::string path(const std::string& name) const { return prefix_ + name; }

  const WeightView* find(const std::string& name) {
    const auto it = tensors_.find(name);
    if (it == tensors_.end()) return nullptr;
    const WeightView* weight = it->second;
    tensors_.erase(it);
    return weight;
  }
  const WeightView& required(const std::string& name) {
    const WeightView* weight = find(name);
    SPECDEC_REQUIRE(weight != nullptr, path(name), ": missing from the checkpoint");
    return *weight;
  }
  // A vector of floats.
  const TensorView& vector(const std::string& name, const WeightView& weight) const {
    SPECDEC_REQUIRE(!is_block_format(weight.type), path(name), ": type ",
                    weight_type_name(weight.type), ": convert to float32, bfloat16 or float16");
    return weight.view;
  }
  // One linear layer made of the named projections, stacked.
  template <typename Linear>
  std::unique_ptr<Linear> linear(const std::vector<std::string>& names,
                                 const std::vector<std::int64_t>& rows, std::int64_t columns) {
    std::vector<WeightView> weights;
    std::vector<TensorView> biases;
    for (std::size_t i = 0; i < names.size(); ++i) {
      weights.push_back(required(names[i] + ".weight"));
      check_matrix(weights.back(), path(names[i] + ".weight"), rows[i], columns);
      const WeightView* bias = find(names[i] + ".bias");
      biases.push_back(bias == nullptr ? TensorView{} : vector(names[i] + ".bias", *bias));
    }
    try {
      return std::make_unique<Linear>(weights, biases);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(path(names[0]) + ": " + error.what());
    }
  }
  void check_all_used() const {
    SPECDEC_REQUIRE(tensors_.empty(), tensors_.empty() ? "" : path(tensors_.begin()->first),
                    ": this decoder has no such weight; use model_impl = 'transformers'");
  }

 private:
  std::string prefix_;
  std::map<std::string, const WeightView*> tensors_;
};

void check_positive(const char* name, std::int64_t value) {
  SPECDEC_REQUIRE(value >= 1, "decoder.", name, " = ", value, ": must be at least 1");
}

}  // namespace

LlamaDecoder::~LlamaDecoder() = default;

LlamaDecoder::LlamaDecoder(DecoderConfig config) : config_(std::move(config)), ops_(row_ops()) {
  if (config_.head_size == 0) config_.head_size = config_.vocab_size;
  const DecoderConfig& c = config_;
  check_positive("vocab_size", c.vocab_size);
  check_positive("head_size", c.head_size);
  SPECDEC_REQUIRE(!c.tie_word_embeddings || c.head_size == c.vocab_size,
                  "decoder.head_size = ", c.head_size,
                  ": with tied embeddings it is vocab_size = ", c.vocab_size);
  check_positive("hidden_size", c.hidden_size);
  check_positive("intermediate_size", c.intermediate_size);
  check_positive("num_layers", c.num_layers);
  check_positive("num_heads", c.num_heads);
  check_positive("num_kv_heads", c.num_kv_heads);
  check_positive("head_dim", c.head_dim);
  check_positive("max_rows", c.max_rows);
  check_positive("max_position", c.max_position);
  SPECDEC_REQUIRE(c.num_heads % c.num_kv_heads == 0, "decoder.num_heads = ", c.num_heads,
                  ": must be a multiple of num_kv_heads = ", c.num_kv_heads);
  SPECDEC_REQUIRE(c.head_dim % 8 == 0 && c.head_dim <= 256, "decoder.head_dim = ", c.head_dim,
                  ": must be a multiple of 8, at most 256");
  for (const auto& [name, cap] :
       {std::pair<const char*, float>{"attention_softcap", c.attention_softcap},
        {"final_softcap", c.final_softcap}}) {
    SPECDEC_REQUIRE(std::isfinite(cap) && cap >= 0.0f, "decoder.", name, " = ", cap,
                    ": give a positive number, or 0 for none");
  }
  const auto layers = static_cast<std::size_t>(c.num_layers);
  SPECDEC_REQUIRE(c.rope_index.size() == layers, "decoder.rope_index has ", c.rope_index.size(),
                  " entries, needs one per layer: ", layers);
  SPECDEC_REQUIRE(c.sliding_window.size() == layers, "decoder.sliding_window has ",
                  c.sliding_window.size(), " entries, needs one per layer: ", layers);
  SPECDEC_REQUIRE(*std::min_element(c.sliding_window.begin(), c.sliding_window.end()) >= 0,
                  "decoder.sliding_window holds a negative number: give tokens, 0 for no window");
  SPECDEC_REQUIRE(c.sink_tokens >= 0, "decoder.sink_tokens = ", c.sink_tokens,
                  ": give 0 (none) or a positive number of tokens");
  int tables = 0;
  for (int index : c.rope_index) {
    SPECDEC_REQUIRE(index >= -1 && index < c.num_layers, "decoder.rope_index holds ", index,
                    ": give -1 (none) or the index of a table");
    tables = std::max(tables, index + 1);
  }
  num_heads_ = c.num_heads;
  num_kv_heads_ = c.num_kv_heads;
  hidden_ = {0, c.hidden_size};
  ffn_ = {0, c.intermediate_size};
  scores_ = {0, c.head_size};
  read_heads_ = {0, std::int64_t{c.num_heads} * c.head_dim};
  read_ffn_ = ffn_;
  SPECDEC_REQUIRE(is_shard() || !c.adds_partial_sums,
                  "decoder.adds_partial_sums: there are no other ranks; give bounds, or false");
  SPECDEC_REQUIRE(!is_shard() || !c.has_fast_forms,
                  "decoder.has_fast_forms: ranks exchange rows in one form; give false");
  if (is_shard()) take_shard();
  layers_.resize(layers);
  ropes_.resize(static_cast<std::size_t>(tables));
}

std::vector<float> LlamaDecoder::norm_weight(const TensorView& weight, const std::string& name,
                                             int size) const {
  SPECDEC_REQUIRE(weight.ndim == 1 && weight.shape[0] == size, name, ": shape must be [", size,
                  "]: weights and config.json do not belong together");
  SPECDEC_REQUIRE(
      weight.dtype == DType::kF32 || weight.dtype == DType::kBF16 || weight.dtype == DType::kF16,
      name, ": dtype ", dtype_name(weight.dtype), ": convert to float32, bfloat16 or float16");
  std::vector<float> out(static_cast<std::size_t>(size));
  for (int i = 0; i < size; ++i)
    out[i] = element(weight, i * weight.strides[0]) + config_.norm_offset;
  return out;
}

void LlamaDecoder::set_embedding(const WeightView& weight) {
  check_matrix(weight, "embed_tokens.weight", config_.vocab_size, config_.hidden_size);
  // With tied embeddings the packed head serves as the table as well: the largest matrix is kept
  // once.
  if (config_.tie_word_embeddings) return pack_head(weight);
  table_ = std::make_unique<PackedLinear>(std::vector<WeightView>{weight});
}

void LlamaDecoder::set_head(const WeightView& weight) {
  SPECDEC_REQUIRE(!config_.tie_word_embeddings,
                  "lm_head.weight: tie_word_embeddings is true, the embedding is the head");
  check_matrix(weight, "lm_head.weight",
               config_.shard_rank == 0 ? config_.head_size : scores_.count, config_.hidden_size);
  pack_head(weight);
}

void LlamaDecoder::pack_head(const WeightView& weight) {
  const std::int64_t rows = weight.view.shape[0];
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    WeightView some = weight;
    some.view.data =
        static_cast<std::byte*>(some.view.data) +
        begin * some.view.strides[0] * static_cast<std::int64_t>(dtype_bytes(some.view.dtype));
    some.view.shape[0] = end - begin;
    return std::make_unique<PackedLinear>(std::vector<WeightView>{some});
  };
  screen_.reset();
  head_ = part(0, scores_.count);
  if (rows > scores_.count) other_head_ = part(scores_.count, rows);
}

void LlamaDecoder::set_final_norm(const TensorView& weight) {
  final_norm_ = norm_weight(weight, "norm.weight", config_.hidden_size);
}

void LlamaDecoder::set_rope(int index, const TensorView& cos, const TensorView& sin) {
  const int tables = static_cast<int>(ropes_.size());
  SPECDEC_REQUIRE(index >= 0 && index < tables, "rope table ", index, ": rope_index names 0..",
                  tables - 1);
  for (const TensorView* view : {&cos, &sin}) {
    SPECDEC_REQUIRE(view->ndim == 2 && view->shape[0] >= config_.max_position &&
                        view->shape[1] >= 1 && view->shape[1] <= config_.head_dim / 2 &&
                        view->shape[1] == cos.shape[1],
                    "rope table ", index, ": cos and sin must be [>= ", config_.max_position,
                    ", 1..", config_.head_dim / 2, "], both the same");
    SPECDEC_REQUIRE(view->dtype == DType::kF32 && view->is_contiguous(), "rope table ", index,
                    ": must be contiguous float32");
  }
  RopeTable& table = ropes_[index];
  table.half = static_cast<int>(cos.shape[1]);
  const auto count = static_cast<std::size_t>(config_.max_position) * table.half;
  const auto* cos_data = static_cast<const float*>(cos.data);
  const auto* sin_data = static_cast<const float*>(sin.data);
  table.cos.assign(cos_data, cos_data + count);
  table.sin.assign(sin_data, sin_data + count);
}

void LlamaDecoder::set_layer(int index, const std::vector<NamedTensor>& tensors) {
  const DecoderConfig& c = config_;
  SPECDEC_REQUIRE(index >= 0 && index < c.num_layers, "layer ", index, ": the model has 0..",
                  c.num_layers - 1);
  TensorMap map(index, tensors);
  const std::int64_t own_q_width = std::int64_t{num_heads_} * c.head_dim;
  const std::int64_t own_kv_width = std::int64_t{num_kv_heads_} * c.head_dim;
  Layer layer;
  const auto norm = [&](const char* name, int size) {
    return norm_weight(map.vector(name, map.required(name)), map.path(name), size);
  };
  layer.attention_norm = norm("input_layernorm.weight", c.hidden_size);
  if (c.has_sandwich_norms) {
    layer.attention_out_norm = norm("post_attention_layernorm.weight", c.hidden_size);
    layer.ffn_norm = norm("pre_feedforward_layernorm.weight", c.hidden_size);
    layer.ffn_out_norm = norm("post_feedforward_layernorm.weight", c.hidden_size);
  } else {
    layer.ffn_norm = norm("post_attention_layernorm.weight", c.hidden_size);
  }
  if (c.has_qk_norm) {
    layer.q_norm = norm("self_attn.q_norm.weight", c.head_dim);
    layer.k_norm = norm("self_attn.k_norm.weight", c.head_dim);
  }
  layer.qkv =
      map.linear<StackedLinear>({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
                                {own_q_width, own_kv_width, own_kv_width}, c.hidden_size);
  layer.o = map.linear<PackedLinear>({"self_attn.o_proj"}, {hidden_.count}, read_heads_.count);
  layer.gate = map.linear<PackedLinear>({"mlp.gate_proj"}, {ffn_.count}, c.hidden_size);
  layer.up = map.linear<PackedLinear>({"mlp.up_proj"}, {ffn_.count}, c.hidden_size);
  layer.down = map.linear<PackedLinear>({"mlp.down_proj"}, {hidden_.count}, read_ffn_.count);
  map.check_all_used();
  SPECDEC_REQUIRE(layer.gate->input_form() == layer.up->input_form(), map.path("mlp.gate_proj"),
                  " is ", weight_type_name(layer.gate->type()), ", up_proj is ",
                  weight_type_name(layer.up->type()),
                  ": they read the same input; convert the checkpoint to one dtype");
  layers_[index] = std::move(layer);
}

void LlamaDecoder::check_complete() const {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    SPECDEC_REQUIRE(layers_[i].defined(), "layer ", i, ": no weights; call set_layer first");
  }
  SPECDEC_REQUIRE(!final_norm_.empty(), "norm.weight: missing; call set_final_norm first");
  SPECDEC_REQUIRE(head_ != nullptr, "head: missing; call set_embedding (tied) or set_head first");
  SPECDEC_REQUIRE(config_.tie_word_embeddings || table_ != nullptr || config_.shard_rank > 0,
                  "embed_tokens.weight: missing; call set_embedding first");
  for (std::size_t i = 0; i < ropes_.size(); ++i) {
    SPECDEC_REQUIRE(ropes_[i].half > 0, "rope table ", i, ": missing; call set_rope first");
  }
}

void LlamaDecoder::bind_cache(const TensorView& k_pages, const TensorView& v_pages,
                              const TensorView* k_scales, const TensorView* v_scales) {
  check_complete();
  const DecoderConfig& c = config_;
  for (const TensorView* view : {&k_pages, &v_pages}) {
    SPECDEC_REQUIRE(
        view->device == DeviceType::kCpu && view->ndim == 5 && view->shape[0] == c.num_layers &&
            view->shape[2] == num_kv_heads_ &&
            view->shape[4] == kv_row_width(view->dtype, c.head_dim) &&
            view->shape == k_pages.shape && view->dtype == k_pages.dtype && view->is_contiguous(),
        "k_pages, v_pages: must be two contiguous CPU tensors [", c.num_layers, ", P, ",
        num_kv_heads_, ", S, ", kv_row_width(view->dtype, c.head_dim), "] of one dtype");
    SPECDEC_REQUIRE(is_kv_dtype(view->dtype), "k_pages, v_pages: dtype ", dtype_name(view->dtype),
                    ": must be float32, bfloat16, float16, float8_e4m3fn or int8");
  }
  const std::int64_t page_size = k_pages.shape[3];
  SPECDEC_REQUIRE(
      is_page_size(page_size) && k_pages.shape[1] >= 1 && k_pages.shape[1] <= INT32_MAX,
      "k_pages, v_pages: ", k_pages.shape[1], " pages of ", page_size,
      " tokens: give at least one page, a page's tokens are a power of two from 1 to 128");
  SPECDEC_REQUIRE((k_scales == nullptr) == (v_scales == nullptr),
                  "k_scale, v_scale: give both or none");
  const std::int64_t num_scales = std::int64_t{c.num_layers} * num_kv_heads_;
  for (const TensorView* view : {k_scales, v_scales}) {
    if (view == nullptr) continue;
    SPECDEC_REQUIRE(k_pages.dtype == DType::kF8E4M3, "k_scale, v_scale: the pages are ",
                    dtype_name(k_pages.dtype), ", scales belong to float8_e4m3fn pages");
    SPECDEC_REQUIRE(view->device == DeviceType::kCpu && view->dtype == DType::kF32 &&
                        view->ndim == 2 && view->shape[0] == c.num_layers &&
                        view->shape[1] == num_kv_heads_ && view->is_contiguous(),
                    "k_scale, v_scale: must be contiguous CPU tensors float32 [", c.num_layers,
                    ", ", num_kv_heads_, "]");
  }
  const auto copied = [&](const TensorView* view) {
    if (view == nullptr) return std::vector<float>();
    const auto* from = static_cast<const float*>(view->data);
    return std::vector<float>(from, from + num_scales);
  };
  k_scales_ = copied(k_scales);
  v_scales_ = copied(v_scales);
  cache_.k = k_pages.data;
  cache_.v = v_pages.data;
  cache_.dtype = k_pages.dtype;
  cache_.num_layers = c.num_layers;
  cache_.num_pages = static_cast<std::int32_t>(k_pages.shape[1]);
  cache_.num_kv_heads = num_kv_heads_;
  cache_.page_size = static_cast<std::int32_t>(k_pages.shape[3]);
  cache_.head_dim = c.head_dim;
  cache_.stride_token = k_pages.shape[4];
  cache_.stride_head = cache_.stride_token * cache_.page_size;
  cache_.stride_page = cache_.stride_head * num_kv_heads_;
  cache_.stride_layer = cache_.stride_page * cache_.num_pages;
  allocate_buffers();
}

void LlamaDecoder::allocate_buffers() {
  if (buffers_ready_) return;
  const DecoderConfig& c = config_;
  const std::int64_t rows = c.max_rows;
  const std::int64_t q_width = std::int64_t{c.num_heads} * c.head_dim;
  input_bytes_ = input_row_bytes(head_->input_form(), c.hidden_size);
  for (const Layer& layer : layers_) {
    input_bytes_ = std::max({input_bytes_, input_row_bytes(layer.qkv->input_form(), c.hidden_size),
                             input_row_bytes(layer.gate->input_form(), c.hidden_size),
                             input_row_bytes(layer.o->input_form(), q_width)});
    act_bytes_ =
        std::max(act_bytes_, input_row_bytes(layer.down->input_form(), c.intermediate_size));
  }
  input_bytes_ = odd_lines(input_bytes_);
  act_bytes_ = odd_lines(act_bytes_);
  attention_stride_ = floats_of_odd_lines(q_width);
  qkv_stride_ = floats_of_odd_lines(layers_[0].qkv->n());
  // A shard's outputs of all rows are gathered at once.
  ffn_rows_ = is_shard() ? rows : std::min(rows, kMaxFfnRows);
  residual_.allocate(rows * c.hidden_size);
  qkv_.allocate(rows * qkv_stride_);
  attention_.allocate(rows * attention_stride_);
  sum_.allocate(rows * c.hidden_size);
  input_.allocate(rows * input_bytes_);
  act_.allocate(ffn_rows_ * act_bytes_);
  buffers_ready_ = true;
}

std::size_t LlamaDecoder::weight_bytes() const {
  std::size_t bytes = 0;
  each_matrix([&](const PackedLinear& matrix) { bytes += matrix.bytes(); });
  return bytes;
}

std::uint64_t LlamaDecoder::read_weights() const {
  std::uint64_t sum = 0;
  each_matrix([&](const PackedLinear& matrix) {
    const bool is_screened = &matrix == head_.get() && screen_ != nullptr;
    sum += is_screened ? screen_->read() : matrix.read();
  });
  return sum;
}

bool LlamaDecoder::has_fast_forms() const {
  if (!config_.has_fast_forms) return false;
  bool found = false;
  each_matrix([&](const PackedLinear& matrix) { found = found || matrix.many_rows() > 0; });
  return found;
}

std::size_t LlamaDecoder::buffer_bytes() const {
  const std::size_t floats = residual_.size() + qkv_.size() + attention_.size() + sum_.size() +
                             gated_.size() + head_scores_.size();
  return floats * sizeof(float) + input_.size() + act_.size() + attention_scratch_.size() +
         best_.size() * sizeof(RowBest) + (screen_ ? screen_->bytes() : 0);
}

}  // namespace specdec::cpu
