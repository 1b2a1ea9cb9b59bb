// Tiles of quantised weights: the tables of all instruction sets that this processor has give the
// bits of the plain one. PackedLinear takes the best table that a cap allows, so that tests through
// it never reach the one for AVX2 where there is AVX-VNNI.
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "backend/cpu/half.h"
#include "backend/cpu/linear/quant_kernels.h"
#include "check.h"

namespace specdec::cpu {
namespace {

constexpr int kSteps = 5, kTileColumns = 32, kStride = 35;
constexpr WeightType kTypes[] = {WeightType::kQ8_0, WeightType::kQ4_0, WeightType::kQ4_1,
                                 WeightType::kQ4K,  WeightType::kQ5K,  WeightType::kQ6K,
                                 WeightType::kQ8G};

struct alignas(64) Line {
  std::byte bytes[64];
};

// A panel of random codes; the extremes of a format are among them.
std::vector<Line> make_panel(WeightType type, std::mt19937& random) {
  const QuantFormat format = quant_format(type);
  const int most = format.nibbles             ? 255
                   : type == WeightType::kQ5K ? 31
                   : type == WeightType::kQ6K ? 63
                                              : 255;
  std::uniform_real_distribution<float> uniform(-0.02f, 0.02f);
  std::vector<Line> panel(static_cast<std::size_t>(format.step_bytes() * kSteps / 64));
  auto* at = reinterpret_cast<std::byte*>(panel.data());
  for (int i = 0; i < kSteps; ++i) {
    for (std::int64_t j = 0; j < format.codes_bytes(); ++j) {
      const unsigned pick = random() % 8;
      const unsigned code = pick == 0 ? 0 : pick == 1 ? most : random() % (most + 1);
      *at++ = static_cast<std::byte>(code);
    }
    const std::int64_t scales = (format.step_bytes() - format.codes_bytes()) /
                                static_cast<std::int64_t>(format.wide_scales ? 4 : 2);
    for (std::int64_t j = 0; j < scales; ++j) {
      const float value = uniform(random);
      const std::uint16_t half = float_to_f16(value);
      std::memcpy(at, format.wide_scales ? static_cast<const void*>(&value) : &half,
                  format.wide_scales ? 4 : 2);
      at += format.wide_scales ? 4 : 2;
    }
  }
  return panel;
}

QuantBlock make_block(std::mt19937& random) {
  QuantBlock block{};
  int low = 0, sum = 0;
  for (int k = 0; k < 32; ++k) {
    const int q = random() % 8 == 0 ? 127 : static_cast<int>(random() % 255) - 127;
    block.q[k] = static_cast<std::int8_t>(q);
    sum += q;
    if (k < 16) low += q;
  }
  block.scale = std::uniform_real_distribution<float>(0.0f, 0.1f)(random);
  block.scaled_sum = block.scale * static_cast<float>(sum);
  block.minus_sum = -sum;
  block.minus_low_sum = static_cast<std::int16_t>(-low);
  return block;
}

// Rows of pairs. In the first step all rows have a second block, in the second none has, in the
// others some have; one that no first block asks for must not be read, and is NaN.
std::vector<QuantBlock> make_x(int rows, std::mt19937& random) {
  std::vector<QuantBlock> x;
  for (int m = 0; m < rows; ++m) {
    for (int i = 0; i < kSteps; ++i) {
      x.push_back(make_block(random));
      x.back().has_rest = i == 0 || (i > 1 && random() % 3 == 0) ? 1 : 0;
      x.push_back(make_block(random));
      if (x[x.size() - 2].has_rest == 0) {
        x.back().scale = x.back().scaled_sum = std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
  return x;
}

std::vector<std::uint32_t> tile_of(QuantTileFn tile, const std::vector<Line>& panel,
                                   const std::vector<QuantBlock>& x, int rows, const float* bias,
                                   int pass_rows = 0) {
  std::vector<float> y(static_cast<std::size_t>(rows) * kStride, -7.0f);
  QuantTileArgs args;
  args.panel = reinterpret_cast<const std::byte*>(panel.data());
  args.x = reinterpret_cast<const std::byte*>(x.data());
  args.x_row_bytes = 2 * kSteps * static_cast<std::int64_t>(sizeof(QuantBlock));
  args.steps = kSteps;
  args.rows = rows;
  args.y = y.data();
  args.y_stride = kStride;
  args.bias = bias;
  args.prefetch = args.panel;
  args.pass_rows = pass_rows;
  tile(args);
  std::vector<std::uint32_t> bits(y.size());
  std::memcpy(bits.data(), y.data(), y.size() * sizeof(float));
  return bits;
}

void check_table(const QuantKernels& table) {
  std::mt19937 random(1);
  float bias[kTileColumns];
  for (float& b : bias) b = std::uniform_real_distribution<float>(-1.0f, 1.0f)(random);
  for (const WeightType type : kTypes) {
    const std::vector<Line> panel = make_panel(type, random);
    for (int rows = 1; rows <= kQuantTileRows; ++rows) {
      const std::vector<QuantBlock> x = make_x(rows, random);
      for (const float* b : {static_cast<const float*>(nullptr), static_cast<const float*>(bias)}) {
        const auto plain = tile_of(quant_kernels_plain().of(type), panel, x, rows, b);
        for (const int pass_rows : {0, 1, 4, 100}) {
          CHECK_EQ(tile_of(table.of(type), panel, x, rows, b, pass_rows), plain);
        }
      }
    }
  }
}

}  // namespace

TEST(quant_tiles_with_avx2_have_the_plain_bits) {
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    check_table(quant_kernels_avx2());
  }
}

TEST(quant_tiles_with_avx_vnni_have_the_plain_bits) {
  if (__builtin_cpu_supports("avxvnni")) check_table(quant_kernels_avx_vnni());
}

TEST(quant_tiles_with_avx512_vnni_have_the_plain_bits) {
  if (__builtin_cpu_supports("avx512vnni")) check_table(quant_kernels_avx512_vnni());
}

}  // namespace specdec::cpu
