// A model that runs without Python: the native CPU decoder over a folder that `specdec convert` has
// written. Its decoder.txt says what the decoder is made of and where the weights lie
// (python/specdec_ext/models/decoder_file.py); no config.json is interpreted here.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/cpu/decoder/llama_decoder.h"
#include "backend/step_view.h"
#include "base/tensor_view.h"
#include "base/zeroed_memory.h"

namespace specdec {

class CpuModel {
 public:
  // max_rows: rows of the largest step. max_position: positions that will be used, 0: all that the
  // model has. std::invalid_argument naming the file, and the line of decoder.txt.
  CpuModel(const std::string& folder, int max_rows, int max_position = 0);

  cpu::LlamaDecoder& decoder() { return *decoder_; }
  const cpu::DecoderConfig& config() const { return decoder_->config(); }
  DType kv_dtype() const { return kv_dtype_; }
  const std::vector<TokenId>& eos_token_ids() const { return eos_token_ids_; }

 private:
  std::unique_ptr<cpu::LlamaDecoder> decoder_;
  DType kv_dtype_ = DType::kF32;
  std::vector<TokenId> eos_token_ids_;
};

// The K/V pages of a model, [layers, pages, kv_heads, page_size, head_dim] for K and for V. They
// outlive the model's steps; memory that no token has reached is not taken.
class CpuPages {
 public:
  CpuPages(const CpuModel& model, int num_pages, int page_size);

  const TensorView& k() const { return k_; }
  const TensorView& v() const { return v_; }
  KvCacheView view() const;

 private:
  ZeroedMemory k_memory_, v_memory_;
  TensorView k_, v_;
};

}  // namespace specdec
