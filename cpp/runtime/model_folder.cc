#include "runtime/model_folder.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#include "backend/cache_view.h"
#include "base/check.h"
#include "base/mapped_file.h"

namespace specdec {
namespace {

using cpu::DecoderConfig;
using cpu::LlamaDecoder;
using cpu::NamedTensor;
using cpu::WeightView;

constexpr const char* kFile = "decoder.txt";
constexpr const char* kRopeFile = "rope.bin";
constexpr const char* kFormat = "specdec-decoder";
constexpr int kVersion = 1;

struct TensorLine {
  std::string type, file;
  std::int64_t offset = 0, rows = 0, columns = 0;
};
struct RopeLine {
  int index = 0;
  std::int64_t offset = 0, rows = 0, columns = 0;
};

// One line's words, read in order.
class Words {
 public:
  Words(std::string place, const std::string& line) : place_(std::move(place)), words_(line) {}

  const std::string& place() const { return place_; }
  std::string word() {
    std::string found;
    SPECDEC_REQUIRE(static_cast<bool>(words_ >> found), place_,
                    ": a word is missing; convert the model again");
    return found;
  }
  std::int64_t number() {
    const std::string found = word();
    char* end = nullptr;
    const std::int64_t value = std::strtoll(found.c_str(), &end, 10);
    SPECDEC_REQUIRE(*end == '\0', place_, ": '", found, "' is no whole number");
    return value;
  }
  float real() {  // Python's hexadecimal floats
    const std::string found = word();
    char* end = nullptr;
    const double value = std::strtod(found.c_str(), &end);
    SPECDEC_REQUIRE(*end == '\0', place_, ": '", found, "' is no number");
    return static_cast<float>(value);
  }
  template <typename T>
  std::vector<T> numbers() {
    std::vector<T> found;
    while (words_ >> std::ws && !words_.eof()) found.push_back(static_cast<T>(number()));
    return found;
  }

 private:
  std::string place_;
  std::istringstream words_;
};

struct Description {
  DecoderConfig config;
  DType kv_dtype = DType::kF32;
  std::vector<TokenId> eos_token_ids;
  std::vector<RopeLine> ropes;
  std::map<std::string, TensorLine> tensors;
};

DType float_type(const std::string& name, const std::string& place) {
  if (name == "float32") return DType::kF32;
  if (name == "float16") return DType::kF16;
  SPECDEC_REQUIRE(name == "bfloat16", place, ": '", name,
                  "': float32, float16 and bfloat16 are the float types");
  return DType::kBF16;
}

void read_field(const std::string& name, Words& words, Description* found) {
  DecoderConfig& c = found->config;
  const std::map<std::string, int*> whole = {
      {"vocab_size", &c.vocab_size},
      {"hidden_size", &c.hidden_size},
      {"intermediate_size", &c.intermediate_size},
      {"num_layers", &c.num_layers},
      {"num_heads", &c.num_heads},
      {"num_kv_heads", &c.num_kv_heads},
      {"head_dim", &c.head_dim},
      {"head_size", &c.head_size},
      {"max_position", &c.max_position},
      {"sink_tokens", &c.sink_tokens},
  };
  const std::map<std::string, float*> real = {
      {"rms_norm_eps", &c.rms_norm_eps},           {"attention_scale", &c.attention_scale},
      {"attention_softcap", &c.attention_softcap}, {"final_softcap", &c.final_softcap},
      {"embedding_scale", &c.embedding_scale},     {"norm_offset", &c.norm_offset},
  };
  const std::map<std::string, bool*> yes_or_no = {
      {"has_qk_norm", &c.has_qk_norm},
      {"has_sandwich_norms", &c.has_sandwich_norms},
      {"tie_word_embeddings", &c.tie_word_embeddings},
  };
  if (whole.contains(name)) {
    *whole.at(name) = static_cast<int>(words.number());
  } else if (real.contains(name)) {
    *real.at(name) = words.real();
  } else if (yes_or_no.contains(name)) {
    *yes_or_no.at(name) = words.number() != 0;
  } else if (name == "activation") {
    const std::string kind = words.word();
    SPECDEC_REQUIRE(kind == "silu" || kind == "gelu_tanh", words.place(), ": activation '", kind,
                    "': silu and gelu_tanh are known");
    c.activation = kind == "silu" ? cpu::Activation::kSilu : cpu::Activation::kGeluTanh;
  } else if (name == "rope_index") {
    c.rope_index = words.numbers<int>();
  } else if (name == "sliding_window") {
    c.sliding_window = words.numbers<int>();
  } else if (name == "kv_dtype") {
    found->kv_dtype = float_type(words.word(), words.place());
  } else if (name == "eos_token_ids") {
    found->eos_token_ids = words.numbers<TokenId>();
  } else if (name == "rope") {
    RopeLine line{static_cast<int>(words.number()), words.number(), 0, 0};
    line.rows = words.number();
    line.columns = words.number();
    found->ropes.push_back(line);
  } else if (name == "tensor") {
    const std::string tensor = words.word();
    TensorLine line{words.word(), words.word(), 0, 0, 0};
    line.offset = words.number();
    line.rows = words.number();
    line.columns = words.number();
    found->tensors[tensor] = std::move(line);
  } else {
    SPECDEC_REQUIRE(false, words.place(), ": '", name,
                    "' is no field of this version; convert the model again");
  }
}

Description read_description(const std::string& folder) {
  const std::string path = folder + "/" + kFile;
  std::ifstream file(path);
  SPECDEC_REQUIRE(file.good(), path,
                  ": cannot be opened; give a folder that `specdec convert` has written of a model "
                  "that the native decoder runs");
  Description found;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    Words words(path + ":" + std::to_string(number), line);
    const std::string name = words.word();
    if (number == 1) {
      const std::int64_t version = name == kFormat ? words.number() : 0;
      SPECDEC_REQUIRE(version == kVersion, words.place(), ": expected '", kFormat, " ", kVersion,
                      "'; convert the model again");
    } else {
      read_field(name, words, &found);
    }
  }
  return found;
}

// `rows` x `columns` elements at `offset` of a file, held against its end.
TensorView tensor_at(const MappedFile& file, const std::string& name, std::int64_t offset,
                     std::int64_t rows, std::int64_t columns, DType dtype, bool is_row) {
  const auto size = static_cast<std::int64_t>(file.bytes());
  const auto element = static_cast<std::int64_t>(dtype_bytes(dtype));
  const bool fits = offset >= 0 && rows > 0 && columns > 0 && offset <= size &&
                    columns <= (size - offset) / element &&
                    rows <= (size - offset) / element / columns;
  SPECDEC_REQUIRE(fits, name, ": ", rows, " x ", columns, " elements at byte ", offset,
                  " are not in its file of ", size, " bytes; convert the model again");
  SPECDEC_REQUIRE(offset % element == 0, name, ": byte ", offset, " is no place for elements of ",
                  element, " bytes; convert the model again");
  TensorView view;
  // The decoder copies what it is given.
  view.data = const_cast<std::byte*>(file.data() + offset);
  view.dtype = dtype;
  view.ndim = is_row ? 1 : 2;
  if (is_row) {
    view.shape[0] = columns;
    view.strides[0] = 1;
  } else {
    view.shape = {rows, columns};
    view.strides = {columns, 1};
  }
  return view;
}

class Weights {
 public:
  Weights(std::string folder, const Description& about)
      : folder_(std::move(folder)), tensors_(about.tensors) {}

  WeightView get(const std::string& name) {
    const auto found = tensors_.find(name);
    SPECDEC_REQUIRE(found != tensors_.end(), folder_, "/", kFile, ": tensor '", name,
                    "' is missing; convert the model again");
    const TensorLine& line = found->second;
    const bool is_blocks = !line.type.starts_with("float") && line.type != "bfloat16";
    const DType dtype = is_blocks ? DType::kU8 : float_type(line.type, name);
    // Norms and biases are rows; a matrix of one row is none of a decoder's.
    const TensorView view = tensor_at(file(line.file), name, line.offset, line.rows, line.columns,
                                      dtype, line.rows == 1);
    return is_blocks ? WeightView(view, cpu::block_format_named(line.type)) : WeightView(view);
  }

  std::vector<NamedTensor> layer(int layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    std::vector<NamedTensor> named;
    for (auto at = tensors_.lower_bound(prefix);
         at != tensors_.end() && at->first.starts_with(prefix); ++at) {
      named.push_back({at->first.substr(prefix.size()), get(at->first)});
    }
    return named;
  }

  const MappedFile& file(const std::string& name) {
    SPECDEC_REQUIRE(name.find('/') == std::string::npos, folder_, "/", kFile, ": '", name,
                    "' is no name of a file in this folder");
    std::unique_ptr<MappedFile>& file = files_[name];
    if (file == nullptr) file = std::make_unique<MappedFile>(folder_ + "/" + name);
    return *file;
  }

 private:
  std::string folder_;
  const std::map<std::string, TensorLine>& tensors_;
  std::map<std::string, std::unique_ptr<MappedFile>> files_;
};

std::size_t page_bytes(const CpuModel& model, int num_pages, int page_size) {
  const DecoderConfig& c = model.config();
  SPECDEC_REQUIRE(num_pages > 0 && page_size > 0, "num_pages = ", num_pages,
                  ", page_size = ", page_size, ": give at least 1 of both");
  return static_cast<std::size_t>(c.num_layers) * num_pages * c.num_kv_heads * page_size *
         c.head_dim * dtype_bytes(model.kv_dtype());
}

TensorView page_tensor(const ZeroedMemory& memory, const CpuModel& model, int num_pages,
                       int page_size) {
  const DecoderConfig& c = model.config();
  TensorView view;
  view.data = memory.data();
  view.dtype = model.kv_dtype();
  view.ndim = 5;
  view.shape = {c.num_layers, num_pages, c.num_kv_heads, page_size, c.head_dim};
  std::int64_t stride = 1;
  for (int i = 4; i >= 0; --i) {
    view.strides[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

}  // namespace

CpuModel::CpuModel(const std::string& folder, int max_rows, int max_position) {
  Description about = read_description(folder);
  DecoderConfig& config = about.config;
  config.max_rows = max_rows;
  if (max_position > 0) config.max_position = std::min(config.max_position, max_position);
  kv_dtype_ = about.kv_dtype;
  eos_token_ids_ = about.eos_token_ids;
  decoder_ = std::make_unique<LlamaDecoder>(config);
  Weights weights(folder, about);
  decoder_->set_embedding(weights.get("model.embed_tokens.weight"));
  if (!config.tie_word_embeddings) decoder_->set_head(weights.get("lm_head.weight"));
  decoder_->set_final_norm(weights.get("model.norm.weight").view);
  for (int layer = 0; layer < config.num_layers; ++layer) {
    decoder_->set_layer(layer, weights.layer(layer));
  }
  for (const RopeLine& rope : about.ropes) {
    const MappedFile& file = weights.file(kRopeFile);
    const std::string name = "rotary table " + std::to_string(rope.index);
    const TensorView cos =
        tensor_at(file, name, rope.offset, rope.rows, rope.columns, DType::kF32, false);
    const std::int64_t behind = rope.offset + rope.rows * rope.columns * 4;
    decoder_->set_rope(rope.index, cos,
                       tensor_at(file, name, behind, rope.rows, rope.columns, DType::kF32, false));
  }
}

CpuPages::CpuPages(const CpuModel& model, int num_pages, int page_size)
    : k_memory_(page_bytes(model, num_pages, page_size)),
      v_memory_(page_bytes(model, num_pages, page_size)),
      k_(page_tensor(k_memory_, model, num_pages, page_size)),
      v_(page_tensor(v_memory_, model, num_pages, page_size)) {}

KvCacheView CpuPages::view() const { return cache_view(k_, v_); }

}  // namespace specdec
