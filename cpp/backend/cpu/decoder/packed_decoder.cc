// LlamaDecoder: its weights as pieces that can be written to a file, and used where they lie.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/cpu/decoder/llama_decoder.h"
#include "base/check.h"

namespace specdec::cpu {
namespace {

constexpr const char* kBias = ".bias";

void append(std::vector<PackedPiece>* pieces, const std::string& name,
            const std::vector<float>& values) {
  if (values.empty()) return;
  PackedView view;
  view.n = static_cast<std::int64_t>(values.size());
  view.data = reinterpret_cast<const std::byte*>(values.data());
  pieces->push_back({name, view});
}

void append(std::vector<PackedPiece>* pieces, const std::string& name, const PackedLinear* linear) {
  if (linear == nullptr) return;
  PackedView pack = linear->view();
  const float* bias = std::exchange(pack.bias, nullptr);
  pieces->push_back({name, pack});
  if (bias == nullptr) return;
  PackedView view;
  view.n = pack.n;
  view.data = reinterpret_cast<const std::byte*>(bias);
  pieces->push_back({name + kBias, view});
}

// The pieces by name; notices the ones nobody asked for.
class Pieces {
 public:
  explicit Pieces(const std::vector<PackedPiece>& pieces) {
    for (const PackedPiece& piece : pieces) {
      const bool is_new = left_.emplace(piece.name, piece.view).second;
      SPECDEC_REQUIRE(is_new, piece.name, ": given twice");
    }
  }

  std::vector<float> floats(const std::string& name, std::int64_t n) {
    const PackedView view = take(name);
    SPECDEC_REQUIRE(view.k == 0 && view.type == WeightType::kF32 && view.n == n, name, ": ", n,
                    " float32 values are needed, found [", view.n, ", ", view.k, "] ",
                    weight_type_name(view.type));
    const auto* data = reinterpret_cast<const float*>(view.data);
    return {data, data + n};
  }

  // A pack of n columns, of `columns` rows each. n = 0: as many as it has.
  PackedView pack(const std::string& name, std::int64_t n, std::int64_t columns) {
    PackedView view = take(name);
    SPECDEC_REQUIRE(view.k == columns && view.n >= 1 && (n == 0 || view.n == n), name, ": shape [",
                    view.n, ", ", view.k, "], the configuration asks for [", n == 0 ? view.n : n,
                    ", ", columns, "]");
    if (left_.contains(name + kBias)) {
      bias_ = floats(name + kBias, view.n);
      view.bias = bias_.data();
    }
    return view;
  }

  std::unique_ptr<PackedLinear> linear(const std::string& name, std::int64_t n,
                                       std::int64_t columns) {
    return std::make_unique<PackedLinear>(pack(name, n, columns));
  }

  // Packs name.0, name.1 ... whose columns add up to n.
  std::unique_ptr<StackedLinear> stack(const std::string& name, std::int64_t n,
                                       std::int64_t columns) {
    std::vector<PackedView> packs;
    std::vector<std::vector<float>> biases;  // until they are copied
    std::int64_t sum = 0;
    while (sum < n) {
      packs.push_back(pack(name + "." + std::to_string(packs.size()), 0, columns));
      biases.push_back(std::move(bias_));
      sum += packs.back().n;
    }
    SPECDEC_REQUIRE(sum == n, name, ": ", sum, " columns, the configuration asks for ", n);
    return std::make_unique<StackedLinear>(packs);
  }

  void check_all_used() const {
    SPECDEC_REQUIRE(left_.empty(), left_.empty() ? "" : left_.begin()->first,
                    ": this decoder has no such piece");
  }

 private:
  PackedView take(const std::string& name) {
    const auto found = left_.find(name);
    SPECDEC_REQUIRE(found != left_.end(), name, ": missing");
    const PackedView view = found->second;
    left_.erase(found);
    return view;
  }

  std::map<std::string, PackedView> left_;
  std::vector<float> bias_;  // of the pack that was taken last
};

std::string layer_prefix(std::size_t index) { return "layers." + std::to_string(index) + "."; }

}  // namespace

std::vector<PackedPiece> LlamaDecoder::packs() const {
  std::vector<PackedPiece> pieces;
  append(&pieces, "table", table_.get());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const std::string prefix = layer_prefix(i);
    SPECDEC_REQUIRE(layer.defined(), prefix, ": no weights; call set_layer first");
    append(&pieces, prefix + "attention_norm", layer.attention_norm);
    append(&pieces, prefix + "ffn_norm", layer.ffn_norm);
    append(&pieces, prefix + "attention_out_norm", layer.attention_out_norm);
    append(&pieces, prefix + "ffn_out_norm", layer.ffn_out_norm);
    append(&pieces, prefix + "q_norm", layer.q_norm);
    append(&pieces, prefix + "k_norm", layer.k_norm);
    const std::vector<PackedLinear>& parts = layer.qkv->parts();
    for (std::size_t part = 0; part < parts.size(); ++part) {
      append(&pieces, prefix + "qkv." + std::to_string(part), &parts[part]);
    }
    append(&pieces, prefix + "o", layer.o.get());
    append(&pieces, prefix + "gate", layer.gate.get());
    append(&pieces, prefix + "up", layer.up.get());
    append(&pieces, prefix + "down", layer.down.get());
  }
  append(&pieces, "norm", final_norm_);
  append(&pieces, "head", head_.get());
  append(&pieces, "other_head", other_head_.get());
  return pieces;
}

void LlamaDecoder::set_packs(const std::vector<PackedPiece>& given) {
  const DecoderConfig& c = config_;
  Pieces pieces(given);
  const std::int64_t q_width = std::int64_t{c.num_heads} * c.head_dim;
  const std::int64_t own_qkv = (std::int64_t{num_heads_} + 2 * num_kv_heads_) * c.head_dim;
  const bool is_first = c.shard_rank == 0;
  if (is_first && !c.tie_word_embeddings) {
    table_ = pieces.linear("table", c.vocab_size, c.hidden_size);
  }
  std::vector<Layer> layers(layers_.size());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    Layer& layer = layers[i];
    const std::string prefix = layer_prefix(i);
    layer.attention_norm = pieces.floats(prefix + "attention_norm", c.hidden_size);
    layer.ffn_norm = pieces.floats(prefix + "ffn_norm", c.hidden_size);
    if (c.has_sandwich_norms) {
      layer.attention_out_norm = pieces.floats(prefix + "attention_out_norm", c.hidden_size);
      layer.ffn_out_norm = pieces.floats(prefix + "ffn_out_norm", c.hidden_size);
    }
    if (c.has_qk_norm) {
      layer.q_norm = pieces.floats(prefix + "q_norm", c.head_dim);
      layer.k_norm = pieces.floats(prefix + "k_norm", c.head_dim);
    }
    layer.qkv = pieces.stack(prefix + "qkv", own_qkv, c.hidden_size);
    layer.o = pieces.linear(prefix + "o", hidden_.count, q_width);
    layer.gate = pieces.linear(prefix + "gate", ffn_.count, c.hidden_size);
    layer.up = pieces.linear(prefix + "up", ffn_.count, c.hidden_size);
    layer.down = pieces.linear(prefix + "down", hidden_.count, c.intermediate_size);
    SPECDEC_REQUIRE(layer.gate->input_form() == layer.up->input_form(), prefix, "gate is ",
                    weight_type_name(layer.gate->type()), ", up is ",
                    weight_type_name(layer.up->type()), ": they read the same input");
  }
  final_norm_ = pieces.floats("norm", c.hidden_size);
  screen_.reset();
  head_ = pieces.linear("head", scores_.count, c.hidden_size);
  if (is_first && c.head_size > scores_.count) {
    other_head_ = pieces.linear("other_head", c.head_size - scores_.count, c.hidden_size);
  }
  pieces.check_all_used();
  layers_ = std::move(layers);
}

}  // namespace specdec::cpu
