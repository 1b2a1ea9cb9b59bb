// Quantised weights by sums of two products in 16 bits (vpmaddubsw): a tile kernel of its own.
//
// Four vectors of columns, a whole panel, meet two rows at a time. Their eight sums are as many
// independent chains, one behind the other in the program, and take half of the registers. Few rows
// unpack a step's weights by pairs of rows; more of them share what is unpacked once, into 1 to 2
// KB on the stack: 16 registers do not hold it.
#include <algorithm>

#include "backend/cpu/linear/quant_ops_avx2.h"
#include "backend/cpu/linear/quant_tile.h"

namespace specdec::cpu {
namespace {

using Ints = __m256i;
using Floats = __m256;
constexpr int kVecs = 4;  // of a panel
// From so many rows on they share one unpacking, which takes as long as one and a half rows.
constexpr int kSharedRows = 8;

// So many quads of k may be added up in 16 bits, where a lane of each holds two products with
// -127..127: 8 of 4-bit codes, 4 of 5, 2 of 6, 1 of 8. For that codes of all 8 bits are taken as
// q = u - 128, in -128..127: |q| * (x with the sign of q). Codes of 0..255 would saturate.
template <WeightType kType>
constexpr int quads_in_16_bits() {
  constexpr int kMost = quant_format(kType).nibbles ? 15
                        : kType == WeightType::kQ5K ? 31
                        : kType == WeightType::kQ6K ? 63
                                                    : 128;
  constexpr int kPair = 2 * kMost * 127;
  static_assert(kPair <= 32767);
  int quads = 1;
  while (quads < 8 && 2 * quads * kPair <= 32767) quads *= 2;
  return quads;
}
template <WeightType kType>
inline constexpr bool kAllBits = quant_format(kType).zero_shift == 7;

// A step of 32 columns, as the products take it.
template <WeightType kType>
struct Step {
  static constexpr QuantFormat kFormat = quant_format(kType);
  static constexpr int kSigned = kAllBits<kType> ? 8 : 0;
  alignas(64) Ints codes[8][kVecs];  // of quads of k; |q| where q has all 8 bits
  Ints signs[kSigned + 1][kVecs];    // q itself
  Floats scale[kVecs], late_scale[kVecs], min[kVecs];
};

// Codes of one quad of k and one vector of columns, straight from the pack.
struct Code {
  Ints magnitude, q;
};
template <WeightType kType>
inline __attribute__((always_inline)) Code code_at(const std::byte* step, int quad, int vec) {
  const Ints code = codes_at<Avx2Ops, kType>(step, quad, vec * Avx2Ops::kLanes);
  if constexpr (!kAllBits<kType>) return {code, code};
  const Ints q = _mm256_xor_si256(code, _mm256_set1_epi8(-128));
  return {_mm256_abs_epi8(q), q};
}

template <WeightType kType>
inline __attribute__((always_inline)) Floats vec_scale(const std::byte* step, int set, int vec) {
  return scale_at<Avx2Ops, kType>(step, set, vec * Avx2Ops::kLanes);
}

template <WeightType kType>
inline __attribute__((always_inline)) void unpack(const std::byte* packed, Step<kType>& step) {
  constexpr QuantFormat kFormat = quant_format(kType);
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const Code code = code_at<kType>(packed, j, v);
      step.codes[j][v] = code.magnitude;
      if constexpr (kAllBits<kType>) step.signs[j][v] = code.q;
    }
    step.scale[v] = vec_scale<kType>(packed, 0, v);
    if constexpr (kFormat.two_scales) step.late_scale[v] = vec_scale<kType>(packed, 1, v);
    if constexpr (kFormat.has_min)
      step.min[v] = vec_scale<kType>(packed, kFormat.two_scales ? 2 : 1, v);
  }
}

// Where the products find a step's weights.
template <WeightType kType>
struct Unpacked {
  const Step<kType>* step;
  __attribute__((always_inline)) Code code(int quad, int vec) const {
    if constexpr (kAllBits<kType>) return {step->codes[quad][vec], step->signs[quad][vec]};
    return {step->codes[quad][vec], step->codes[quad][vec]};
  }
  __attribute__((always_inline)) Floats scale(int vec) const { return step->scale[vec]; }
  __attribute__((always_inline)) Floats late_scale(int vec) const { return step->late_scale[vec]; }
  __attribute__((always_inline)) Floats min(int vec) const { return step->min[vec]; }
};
template <WeightType kType>
struct Packed {
  const std::byte* step;
  __attribute__((always_inline)) Code code(int quad, int vec) const {
    return code_at<kType>(step, quad, vec);
  }
  __attribute__((always_inline)) Floats scale(int vec) const {
    return vec_scale<kType>(step, 0, vec);
  }
  __attribute__((always_inline)) Floats late_scale(int vec) const {
    return vec_scale<kType>(step, 1, vec);
  }
  __attribute__((always_inline)) Floats min(int vec) const {
    return vec_scale<kType>(step, quant_format(kType).two_scales ? 2 : 1, vec);
  }
};

// The compiler keeps the order of what is computed into `v`. Left alone it adds up products in
// trees, of all quads at once, and spills.
inline __attribute__((always_inline)) void in_order(Ints& v) { asm("" : "+x"(v)); }

// Adds kBlockVecs vectors of columns, from `first` on, of one step to kRows rows; y[m]: of column
// 0.
template <WeightType kType, int kRows, int kBlockVecs, typename Weights>
inline __attribute__((always_inline)) void add_vecs(const Weights& weights,
                                                    const std::byte* const (&x)[kRows],
                                                    float* const (&y)[kRows], int first) {
  // Hides where the weights lie: the compiler would read them once for all rows and spill them.
  Weights w = weights;
  asm("" : "+r"(w.step));
  constexpr QuantFormat kFormat = quant_format(kType);
  constexpr bool kHasZero = kFormat.zero_shift >= 0 && !kAllBits<kType>;
  constexpr int kRun = quads_in_16_bits<kType>();
  const Ints ones = _mm256_set1_epi16(1);
  Ints pairs[kRows][kBlockVecs], sum[kRows][kBlockVecs], late[kRows][kBlockVecs];
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    Code code[kBlockVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kBlockVecs; ++v) {
      code[v] = w.code(j, first + v);
      in_order(code[v].magnitude);
    }
#pragma GCC unroll 2
    for (int m = 0; m < kRows; ++m) {
      const Ints quad = Avx2Ops::splat(x[m] + 4 * j);
#pragma GCC unroll 4
      for (int v = 0; v < kBlockVecs; ++v) {
        Ints factor = quad;
        if constexpr (kAllBits<kType>) factor = _mm256_sign_epi8(quad, code[v].q);
        Ints& some = pairs[m][v];
        const Ints products = _mm256_maddubs_epi16(code[v].magnitude, factor);
        some = j % kRun == 0 ? products : _mm256_add_epi16(some, products);
        in_order(some);
        if (j % kRun != kRun - 1) continue;
        const bool is_late = kFormat.two_scales && j >= 4;
        const bool is_first = j < kRun || (is_late && j < 4 + kRun);
        Ints& into = is_late ? late[m][v] : sum[m][v];
        const Ints wide = _mm256_madd_epi16(some, ones);
        into = is_first ? wide : _mm256_add_epi32(into, wide);
        in_order(into);
      }
    }
  }
  Floats x_scale[kRows], x_sum[kRows];
  Ints start[kRows], late_start[kRows];
#pragma GCC unroll 2
  for (int m = 0; m < kRows; ++m) {
    const QuantBlock& block = block_at(x[m]);
    x_scale[m] = Avx2Ops::splat_float(&block.scale);
    x_sum[m] = Avx2Ops::splat_float(&block.scaled_sum);
    if constexpr (kHasZero) {
      start[m] = start_of<Avx2Ops, kType>(block, 0);
      if constexpr (kFormat.two_scales) late_start[m] = start_of<Avx2Ops, kType>(block, 1);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kBlockVecs; ++v) {
    Floats scale = w.scale(first + v), late_scale = scale, min = scale;
    if constexpr (kFormat.two_scales) late_scale = w.late_scale(first + v);
    if constexpr (kFormat.has_min) min = w.min(first + v);
#pragma GCC unroll 2
    for (int m = 0; m < kRows; ++m) {
      const auto add_term = [&](Ints whole, Floats factor, Floats value) {
        return Avx2Ops::fma(_mm256_cvtepi32_ps(whole), _mm256_mul_ps(factor, x_scale[m]), value);
      };
      float* at = y[m] + (first + v) * Avx2Ops::kLanes;
      if constexpr (kHasZero) sum[m][v] = _mm256_add_epi32(sum[m][v], start[m]);
      Floats value = add_term(sum[m][v], scale, Avx2Ops::load(at));
      if constexpr (kFormat.two_scales) {
        if constexpr (kHasZero) late[m][v] = _mm256_add_epi32(late[m][v], late_start[m]);
        value = add_term(late[m][v], late_scale, value);
      }
      if constexpr (kFormat.has_min) value = Avx2Ops::fma(min, x_sum[m], value);
      Avx2Ops::store(at, value);
    }
  }
}

template <WeightType kType, int kRows, typename Weights>
inline __attribute__((always_inline)) void add_block(const Weights& w,
                                                     const std::byte* const (&x)[kRows],
                                                     float* const (&y)[kRows]) {
  // Sums in both 16 and 32 bits take twice the registers.
  constexpr int kRun = quads_in_16_bits<kType>();
  constexpr int kBlockVecs = kRun == 1 || kRun == 8 ? kVecs : 2;
#pragma GCC unroll 2
  for (int first = 0; first < kVecs; first += kBlockVecs) {
    add_vecs<kType, kRows, kBlockVecs>(w, x, y, first);
  }
}

// One step of all rows of a tile, two at a time, then their second blocks.
template <WeightType kType, typename Weights>
inline __attribute__((always_inline)) void add_rows(Weights w, const std::byte* x,
                                                    std::int64_t x_row_bytes, int rows, float* y) {
  int with_rest[kQuantTileRows + 1];
  int count = 0;
  int m = 0;
  const std::byte* from = x;
  for (; m + 2 <= rows; m += 2, from += 2 * x_row_bytes) {
    float* to = y + m * kPanelWidth;
    const std::byte* next = from + x_row_bytes;
    add_block<kType, 2>(w, {from, next}, {to, to + kPanelWidth});
    // Without branches, which nothing could foresee: one row in twelve.
    with_rest[count] = m;
    count += block_at(from).has_rest;
    with_rest[count] = m + 1;
    count += block_at(next).has_rest;
  }
  if (m < rows) {
    add_block<kType, 1>(w, {from}, {y + m * kPanelWidth});
    with_rest[count] = m;
    count += block_at(from).has_rest;
  }
  for (int i = 0; i < count; ++i) {
    m = with_rest[i];
    add_block<kType, 1>(w, {x + m * x_row_bytes + sizeof(QuantBlock)}, {y + m * kPanelWidth});
  }
}

template <WeightType kType>
void tile(const QuantTileArgs& args) {
  constexpr std::int64_t kStepBytes = quant_format(kType).step_bytes();
  // Rows of args.y are often a multiple of 4 KiB apart and would share a few sets of the cache.
  alignas(64) float sums[kQuantTileRows * kPanelWidth];
  std::fill_n(sums, args.rows * kPanelWidth, 0.0f);
  fetch_to_write(args.y, args.y_stride, args.rows);
  const std::int64_t ahead = args.prefetch - args.panel;
  const std::byte* packed = args.panel;
  const std::byte* x = args.x;
  Step<kType> step;
  for (std::int64_t i = 0; i < args.steps; ++i, packed += kStepBytes, x += kQuantBlockPair) {
#pragma GCC unroll 24
    for (std::int64_t line = 0; line < kStepBytes; line += 64) {
      Avx2Ops::prefetch(packed + ahead + line);
    }
    if (args.rows < kSharedRows) {
      add_rows<kType>(Packed<kType>{packed}, x, args.x_row_bytes, args.rows, sums);
    } else {
      unpack<kType>(packed, step);
      // Hides from the compiler what lies in `step`: it would keep copies of all of it.
      const Step<kType>* hidden = &step;
      asm("" : "+r"(hidden) : : "memory");
      add_rows<kType>(Unpacked<kType>{hidden}, x, args.x_row_bytes, args.rows, sums);
    }
  }
  for (int m = 0; m < args.rows; ++m) {
    float* y = args.y + m * args.y_stride;
    const float* sum = sums + m * kPanelWidth;
    for (int c = 0; c < kPanelWidth; ++c) {
      y[c] = args.bias != nullptr ? sum[c] + args.bias[c] : sum[c];
    }
  }
}

}  // namespace

const QuantKernels& quant_kernels_avx2() {
  static constexpr QuantKernels kernels = {&tile<WeightType::kQ8_0>, &tile<WeightType::kQ4_0>,
                                           &tile<WeightType::kQ4_1>, &tile<WeightType::kQ4K>,
                                           &tile<WeightType::kQ5K>,  &tile<WeightType::kQ6K>,
                                           &tile<WeightType::kQ8G>,  kQuantTileRows};
  return kernels;
}

}  // namespace specdec::cpu
