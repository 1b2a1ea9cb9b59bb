// What a Python LlamaDecoder holds.
#pragma once

#include <utility>

#include "backend/cpu/decoder/llama_decoder.h"
#include "bind/dlpack_convert.h"

namespace specdec {

// The decoder and the cache tensors it points into.
struct DecoderObject {
  explicit DecoderObject(cpu::DecoderConfig config) : decoder(std::move(config)) {}
  cpu::LlamaDecoder decoder;
  BorrowedTensor k_pages, v_pages, taps;
};

}  // namespace specdec
