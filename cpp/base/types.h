// Scalar types, limits and the host/device marker shared by every layer.
//
// Axis letters, fixed once for C++, CUDA, Python and docs:
//   B requests in a step   R rows (step tokens) of all requests   H query heads   G KV heads
//   K head dim             P pages   S page size (tokens)          V vocabulary    W mask words
#pragma once

#include <cstddef>
#include <cstdint>

// Marks a function that is compiled for the host and, under nvcc, for the device too. This and the
// two check macros in check.h are the only macros of the project.
#if defined(__CUDACC__)
#define SPECDEC_HD __host__ __device__
#else
#define SPECDEC_HD
#endif

namespace specdec {

using TokenId = std::int32_t;
using RequestId = std::int64_t;

// Step tokens of one request: the golden token (last decided, not yet in the KV cache) plus drafts.
inline constexpr int kMaxStepTokens = 128;
inline constexpr int kMaxDraftLen = kMaxStepTokens - 1;
// Mask rows are 32-bit words, least significant bit first: bit (j & 31) of word (j >> 5) of row i
// says "row i may attend step token j".
inline constexpr int kMaskWords = kMaxStepTokens / 32;

enum class DType : std::uint8_t { kF32, kF16, kBF16, kI32, kI64, kU8, kU32, kBool, kF8E4M3, kI8 };
enum class DeviceType : std::uint8_t { kCpu, kCuda };

constexpr std::size_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
    case DType::kU32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kI64:
      return 8;
    case DType::kU8:
    case DType::kBool:
    case DType::kF8E4M3:
    case DType::kI8:
      return 1;
  }
  return 0;
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kU8:
      return "uint8";
    case DType::kU32:
      return "uint32";
    case DType::kBool:
      return "bool";
    case DType::kF8E4M3:
      return "float8_e4m3fn";
    case DType::kI8:
      return "int8";
  }
  return "unknown";
}

}  // namespace specdec
