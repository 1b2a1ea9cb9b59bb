// Attention in bfloat16 with dot products of pairs (AVX512_BF16): processors without tiles.
#include <cstring>

#include "backend/cpu/attention/attention_narrow.h"

namespace specdec::cpu {
namespace {

using F = Avx512::F;

// sum + the products of 16 pairs of bf16 with one pair, or with as many.
inline F add_pairs(F sum, __m512i pairs, __m512i others) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(pairs),
                          reinterpret_cast<__m512bh>(others));
}
inline __m512i load_pairs(const void* pairs) { return _mm512_loadu_si512(pairs); }
inline __m512i broadcast_pair(const std::uint16_t* pair) {
  std::int32_t word;
  std::memcpy(&word, pair, sizeof(word));
  return _mm512_set1_epi32(word);
}

// Scores of N row-heads and 32 keys.
template <int N>
void score_pairs(const std::uint16_t* q, int head_dim, const float* keys, float* out,
                 std::int64_t stride) {
  F low[N], high[N];
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) low[r] = high[r] = F{};
  const float* behind = keys + head_dim / 2 * kTileRows;  // the last 16 keys
  for (int d = 0; d < head_dim; d += 2) {
    const __m512i k_low = load_pairs(keys + d / 2 * kTileRows);
    const __m512i k_high = load_pairs(behind + d / 2 * kTileRows);
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      const __m512i x = broadcast_pair(q + r * head_dim + d);
      low[r] = add_pairs(low[r], k_low, x);
      high[r] = add_pairs(high[r], k_high, x);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) {
    store<Avx512>(out + r * stride, low[r]);
    store<Avx512>(out + r * stride + kTileRows, high[r]);
  }
}

// acc[N row-heads][16 * G head dims] += probabilities * V; step_words: from the V of one step's
// keys to that of the next.
template <int N, int G>
void value_pairs(const std::uint16_t* p, const std::uint16_t* v, int steps, std::int64_t step_words,
                 bool is_first, float* acc, int acc_stride) {
  F sum[N][G];
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      sum[r][g] = is_first ? F{} : load<Avx512>(acc + r * acc_stride + g * kTileRows);
    }
  }
  int step = 0;
  do {
    for (int pair = 0; pair < kKeys / 2; ++pair) {
      __m512i value[G];
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) value[g] = load_pairs(v + (g * kTile + pair * kTileRows) * 2);
#pragma GCC unroll 8
      for (int r = 0; r < N; ++r) {
        const __m512i weight = broadcast_pair(p + r * kKeys + pair * 2);
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) sum[r][g] = add_pairs(sum[r][g], value[g], weight);
      }
    }
    p += 2 * kTile;
    v += step_words;
  } while (++step < steps);
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) store<Avx512>(acc + r * acc_stride + g * kTileRows, sum[r][g]);
  }
}

struct Pairs {
  struct Registers {};

  static void scores(const std::uint16_t* q, int rows, int head_dim, const float* keys, float* out,
                     std::int64_t stride) {
    for (int i = 0; i < rows; i += Avx512::kScoreRows) {
      with_constant<Avx512::kScoreRows>(min_of(rows - i, Avx512::kScoreRows), [&](auto n) {
        score_pairs<n>(q + i * head_dim, head_dim, keys, out + i * stride, stride);
      });
    }
  }

  static void values(const std::uint16_t* p, int rows, const std::uint16_t* v, int steps,
                     int groups, bool is_first, float* acc, int head_dim) {
    const std::int64_t step_words = std::int64_t{groups} * 2 * kTile;
    for (int i = 0; i < rows; i += Avx512::kValueRows) {
      with_constant<Avx512::kValueRows>(min_of(rows - i, Avx512::kValueRows), [&](auto n) {
        for (int group = 0; group < groups; group += Avx512::kValueVectors) {
          with_constant<Avx512::kValueVectors>(
              min_of(groups - group, Avx512::kValueVectors), [&](auto g) {
                value_pairs<n, g>(p + i * kKeys, v + group * 2 * kTile, steps, step_words, is_first,
                                  acc + i * head_dim + group * kTileRows, head_dim);
              });
        }
      });
    }
  }
};

}  // namespace

const AttentionKernels& attention_kernels_avx512_bf16() {
  static const AttentionKernels kernels = narrow_kernels<Pairs>();
  return kernels;
}

}  // namespace specdec::cpu
