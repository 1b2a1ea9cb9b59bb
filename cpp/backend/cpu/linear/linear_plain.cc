// Plain C++: the fallback of every machine. The compiler may vectorise over columns, which changes
// no bit; the multiply and the add stay apart (-ffp-contract=off).
#include <bit>
#include <cstring>

#include "backend/cpu/e4m3.h"
#include "backend/cpu/half.h"
#include "backend/cpu/linear/linear_kernels.h"

namespace specdec::cpu {
namespace {

constexpr int kRows = 4;

float read_float(const std::byte* p) {
  float value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

struct PlainF32 {
  static constexpr int kStepBytes = 128;
  static void step(float* acc, const std::byte* w, const std::byte* x) {
    const float* weights = reinterpret_cast<const float*>(w);
    const float input = read_float(x);
    for (int c = 0; c < 32; ++c) acc[c] += weights[c] * input;
  }
};

struct PlainF16 {
  static constexpr int kStepBytes = 64;
  static void step(float* acc, const std::byte* w, const std::byte* x) {
    const std::uint16_t* weights = reinterpret_cast<const std::uint16_t*>(w);
    const float input = read_float(x);
    for (int c = 0; c < 32; ++c) acc[c] += f16_to_float(weights[c]) * input;
  }
};

struct PlainBf16 {
  static constexpr int kStepBytes = 128;
  static void step(float* acc, const std::byte* w, const std::byte* x) {
    const std::uint16_t* weights = reinterpret_cast<const std::uint16_t*>(w);
    std::uint16_t pair[2];
    std::memcpy(pair, x, sizeof(pair));
    const float even = bf16_to_float(pair[0]), odd = bf16_to_float(pair[1]);
    for (int c = 0; c < 32; ++c) {
      acc[c] += bf16_to_float(weights[2 * c]) * even;
      acc[c] += bf16_to_float(weights[2 * c + 1]) * odd;
    }
  }
};

template <typename Op, int kCount>
void plain_tile(const TileArgs& args) {
  for (int m = 0; m < kCount; ++m) {
    float acc[32];
    float* y = args.y + m * args.y_stride;
    for (float& sum : acc) sum = 0.0f;
    const std::byte* x = args.x + m * args.x_row_bytes;
    for (std::int64_t s = 0; s < args.steps; ++s) {
      Op::step(acc, args.panel + s * Op::kStepBytes, x + 4 * s);
    }
    for (int c = 0; c < 32; ++c) {
      const float scaled = args.scale != nullptr ? acc[c] * args.scale[c] : acc[c];
      const float sum = args.resume ? y[c] + scaled : scaled;
      y[c] = args.bias != nullptr ? sum + args.bias[c] : sum;
    }
  }
}

void widen(const std::byte* codes, std::uint16_t* out, const std::byte*) {
  for (int i = 0; i < kScaledCodes; ++i) {
    const int step = i / 64, column = i % 64 / 2;
    const auto code = static_cast<std::uint8_t>(codes[64 * step + scaled_place(column) + i % 2]);
    out[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(e4m3_to_float(code)) >> 16);
  }
}

template <typename Op>
constexpr void fill(TileFn* table) {
  table[1] = &plain_tile<Op, 1>;
  table[2] = &plain_tile<Op, 2>;
  table[3] = &plain_tile<Op, 3>;
  table[kRows] = &plain_tile<Op, kRows>;
}

constexpr LinearKernels make_plain() {
  LinearKernels kernels{};
  kernels.max_rows = kernels.bf16_rows = kRows;
  fill<PlainF32>(kernels.f32);
  fill<PlainF16>(kernels.f16);
  fill<PlainBf16>(kernels.bf16);
  kernels.widen = &widen;
  return kernels;
}

}  // namespace

const LinearKernels& linear_kernels_plain() {
  static constexpr LinearKernels kernels = make_plain();
  return kernels;
}

}  // namespace specdec::cpu
