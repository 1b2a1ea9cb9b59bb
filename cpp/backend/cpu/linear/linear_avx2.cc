#include <immintrin.h>

#include <cstring>

#include "backend/cpu/linear/linear_tile.h"

namespace specdec::cpu {
namespace {

struct Avx2 {
  using Vec = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kAccumulators = 12;  // of 16 registers
  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec load_y(const float* p) { return _mm256_loadu_ps(p); }
  static void store_y(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  // always_inline: GCC takes a function that only prefetches for one without effect and drops its
  // calls unless they are inlined at once.
  __attribute__((always_inline)) static void prefetch(const std::byte* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
  }
};

struct Avx2F32 : Avx2 {
  using Weights = __m256;
  using Input = __m256;
  static constexpr int kStepBytes = 128;
  static Weights load(const std::byte* p) {
    return _mm256_load_ps(reinterpret_cast<const float*>(p));
  }
  static Input broadcast(const std::byte* p) {
    return _mm256_broadcast_ss(reinterpret_cast<const float*>(p));
  }
  static Vec mac(Vec acc, Weights w, Input x) { return _mm256_fmadd_ps(w, x, acc); }
};

struct Avx2F16 : Avx2F32 {
  static constexpr int kStepBytes = 64;
  static Weights load(const std::byte* p) {
    return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  }
};

// bf16 is the upper half of a float: a pair splits into two floats with a shift and a mask.
struct Avx2Bf16 : Avx2 {
  struct Pair {
    __m256 low, high;
  };
  using Weights = Pair;
  using Input = Pair;
  static constexpr int kStepBytes = 128;
  static constexpr int kAccumulators = 8;
  static Pair split(__m256i pairs) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)))};
  }
  static Weights load(const std::byte* p) {
    return split(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Input broadcast(const std::byte* p) {
    return split(_mm256_set1_epi32(*reinterpret_cast<const std::int32_t*>(p)));
  }
  static Vec mac(Vec acc, Weights w, Input x) {
    return _mm256_fmadd_ps(w.high, x.high, _mm256_fmadd_ps(w.low, x.low, acc));
  }
};

// More than two rows of bf16: split into floats once per tile and not again for every vector of
// columns. What is left beside the products then fits between them. (One row or two wait for
// memory, which splitting beforehand would leave idle meanwhile.)
void split_row(const std::byte* x, std::int64_t steps, float* out) {
  std::int64_t i = 0;
  for (; i + 4 <= steps; i += 4) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 4 * i));
    const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16);
    _mm256_store_si256(reinterpret_cast<__m256i*>(out + 2 * i), wide);
  }
  for (; i < steps; ++i) {
    std::uint32_t pair;
    std::memcpy(&pair, x + 4 * i, sizeof(pair));
    const std::uint32_t halves[2] = {pair << 16, pair & 0xffff0000u};
    std::memcpy(out + 2 * i, halves, sizeof(halves));
  }
}

constexpr int kSplitRow = 2 * kChainSteps;

// acc += w x in place, which fits 12 sums, weights and inputs: the compiler's own choice among the
// three forms of the instruction copies sums, and spills.
inline __attribute__((always_inline)) void mac_in_place(__m256& acc, __m256 w, __m256 x) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
}

// kRows rows, as floats, by kVecs vectors of columns from `column` on.
template <int kRows, int kVecs, bool kPrefetch>
inline __attribute__((always_inline)) void bf16_block(const TileArgs& args, const float* x,
                                                      int column) {
  __m256 acc[kRows][kVecs];
#pragma GCC unroll 6
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) acc[m][v] = Avx2::zero();
  }
  const std::byte* w = args.panel + column * 4;
  const std::byte* w_end = w + args.steps * Avx2Bf16::kStepBytes;
  const std::int64_t ahead = args.prefetch - args.panel;
  for (; w != w_end; w += Avx2Bf16::kStepBytes, x += 2) {
    if constexpr (kPrefetch) {
      Avx2::prefetch(w + ahead);
      Avx2::prefetch(w + ahead + 64);
    }
    // Two vectors of even k meet all rows, then two of odd k: with 12 sums that fits the registers.
#pragma GCC unroll 4
    for (int pair = 0; pair < kVecs; ++pair) {
      const int v = pair / 2 * 2;
      const bool is_odd = pair % 2 != 0;
      asm("" : "+r"(x));  // read again what it points to: no registers are left to keep it in
      const auto first = Avx2Bf16::load(w + v * 32), second = Avx2Bf16::load(w + v * 32 + 32);
      const __m256 w0 = is_odd ? first.high : first.low, w1 = is_odd ? second.high : second.low;
#pragma GCC unroll 6
      for (int m = 0; m < kRows; ++m) {
        const __m256 input = _mm256_broadcast_ss(x + m * kSplitRow + is_odd);
        mac_in_place(acc[m][v], w0, input);
        mac_in_place(acc[m][v + 1], w1, input);
      }
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      store_sum<Avx2>(args, m, column + v * Avx2::kLanes, acc[m][v]);
    }
  }
}

template <int kRows>
void bf16_tile(const TileArgs& args) {
  fetch_to_write(args.y, args.y_stride, kRows);
  alignas(32) float x[kRows * kSplitRow];
  for (int m = 0; m < kRows; ++m) {
    split_row(args.x + m * args.x_row_bytes, args.steps, x + m * kSplitRow);
  }
  constexpr int kVecs = kRows <= 3 ? 4 : 2;
  bf16_block<kRows, kVecs, true>(args, x, 0);
  if constexpr (kVecs < 4) bf16_block<kRows, kVecs, false>(args, x, kVecs * Avx2::kLanes);
}

// Groups of e4m3 weights lie in the nearest cache when their tiles run: there is no memory to wait
// for, and two rows gain by being split, too.
void bf16_two_rows(const TileArgs& args) {
  args.scale != nullptr ? bf16_tile<2>(args) : tile<Avx2Bf16, 2>(args);
}

// e4m3 to bf16, both bytes of 32 numbers apart. A normal number's lower byte is its lower four bits
// and zeros; in the upper one the exponent's bias 7 is made 127. Of the eight subnormal magnitudes,
// each a normal bf16, there are tables.
void widen(const std::byte* codes, std::uint16_t* out, const std::byte* prefetch) {
  const __m256i low_of_subnormal = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 0, -0x80, -0x40, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0));
  const __m256i high_of_subnormal = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0));
  const __m256i magnitude_bits = _mm256_set1_epi8(0x7f), upper_bits = _mm256_set1_epi8(-0x10),
                exponent_bits = _mm256_set1_epi8(7), bias = _mm256_set1_epi8(120 / 2),
                smallest_normal = _mm256_set1_epi8(8);
  for (int i = 0; i < kScaledCodes; i += 32) {
    if (i % 64 == 0) Avx2::prefetch(prefetch + i);
    const __m256i code = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + i));
    const __m256i magnitude = _mm256_and_si256(code, magnitude_bits);
    const __m256i is_subnormal = _mm256_cmpgt_epi8(smallest_normal, magnitude);
    __m256i low = _mm256_and_si256(_mm256_slli_epi16(code, 4), upper_bits);
    __m256i high =
        _mm256_add_epi8(_mm256_and_si256(_mm256_srli_epi16(code, 4), exponent_bits), bias);
    low = _mm256_blendv_epi8(low, _mm256_shuffle_epi8(low_of_subnormal, magnitude), is_subnormal);
    high =
        _mm256_blendv_epi8(high, _mm256_shuffle_epi8(high_of_subnormal, magnitude), is_subnormal);
    high = _mm256_or_si256(high, _mm256_andnot_si256(magnitude_bits, code));
    auto* to = reinterpret_cast<__m256i*>(out + i / 64 * 64 + i % 64 / 2);
    _mm256_store_si256(to, _mm256_unpacklo_epi8(low, high));
    _mm256_store_si256(to + 2, _mm256_unpackhi_epi8(low, high));
  }
}

constexpr LinearKernels make_avx2() {
  constexpr int kRows = 6;
  LinearKernels kernels = make_linear_kernels<Avx2F32, Avx2F16, Avx2Bf16, kRows>(&widen);
  kernels.bf16[2] = &bf16_two_rows;
  kernels.bf16[3] = &bf16_tile<3>;
  kernels.bf16[4] = &bf16_tile<4>;
  kernels.bf16[5] = &bf16_tile<5>;
  kernels.bf16[6] = &bf16_tile<6>;
  return kernels;
}

}  // namespace

const LinearKernels& linear_kernels_avx2() {
  static constexpr LinearKernels kernels = make_avx2();
  return kernels;
}

}  // namespace specdec::cpu
