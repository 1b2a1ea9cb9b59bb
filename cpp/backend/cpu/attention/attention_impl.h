// The text of every AttentionKernels table; see attention_kernels.h for what the phases compute.
// Included once per instruction set, in an anonymous namespace (see attention_math.h).
#pragma once

#include <algorithm>
#include <type_traits>

#include "backend/cpu/attention/attention_geometry.h"
#include "backend/cpu/attention/attention_math.h"
#include "backend/cpu/attention/attention_values.h"

namespace specdec::cpu {
namespace {

// -- Scores --------------------------------------------------------------------------------------

template <typename V>
constexpr int kTileKeys = 2 * V::W;

alignas(64) constexpr float kZeroRow[256] = {};

// Keys in bf16 that are transposed as pairs of head dims and widened in registers: half of the
// shuffles, and no float32 rows in between.
template <typename V, typename T>
constexpr bool kTransposesPairs =
    std::is_same_v<T, Bf16> && requires(const Bf16* const* rows, typename V::F* out) {
      V::load_transposed_bf16(rows, 0, out);
    };

// Keys to be fetched while others are transposed: those of slots [slot, slot + count), `apart`
// elements from where the reader has them.
struct NextKeys {
  std::int32_t slot;
  int count;
  std::int64_t apart;
};

// tile[d, j] = key j's head dim d; columns past `keys` are zero. `wide` is room for kTileKeys rows
// of float32, in whole chunks of kDimChunk, where they are not transposed as they are. Keys that no
// row sees are zero, too: their page may be somebody else's. The keys `next` and, where they
// have a reader, the tile's own `values` are fetched meanwhile: they are 16 to 32 short streams,
// which the hardware does not follow by itself.
template <typename V, typename T>
inline void fill_k_tile(const SlotReader<T>& reader, const SlotReader<T>* values,
                        const AttentionBlock& block, std::int32_t slot, int keys, NextKeys next,
                        int head_dim, float* wide, float* tile) {
  constexpr bool kPairs = kTransposesPairs<V, T>;
  using Row = std::conditional_t<kPairs, T, float>;
  const Row* rows[kTileKeys<V>];
  const T *found[kTileKeys<V>], *ahead[kTileKeys<V>], *values_ahead[kTileKeys<V>];
  const auto* zeros = reinterpret_cast<const Row*>(kZeroRow);
  const int stride = (head_dim + kDimChunk - 1) / kDimChunk * kDimChunk;
  const auto* nothing = reinterpret_cast<const T*>(kZeroRow);
  reader.find(slot, keys, 0, found);
  reader.find(next.slot, next.count, next.apart, ahead);
  std::fill(ahead + next.count, ahead + kTileKeys<V>, nothing);
  const int num_values = values != nullptr ? keys : 0;
  if (values != nullptr) values->find(slot, keys, 0, values_ahead);
  std::fill(values_ahead + num_values, values_ahead + kTileKeys<V>, nothing);
  for (int j = 0; j < kTileKeys<V>; ++j) {
    if (j >= keys || !is_read(block, slot + j)) {
      rows[j] = zeros;
    } else if constexpr (kPairs || sizeof(T) == 4) {
      rows[j] = found[j];
    } else {
      float* to = wide + j * stride;
      rows[j] = to;
      widen_row<V>(found[j], reader.factor(found[j]), 0, head_dim, head_dim, to);
    }
  }
  // A few lines at a time, all along the transposition: a burst would only queue up.
  constexpr int kStep = kPairs ? 8 : 4;  // head dims at a time
  constexpr int kDims = 64 / sizeof(T);  // head dims in a cache line
  constexpr int kFetches = V::W * kStep / kDims;
  constexpr int kSteps = kDims / (V::W * kStep);  // of one fetch, where lines are longer than that
  for (int first = 0; first < kTileKeys<V>; first += V::W) {
    for (int d = 0; d < head_dim; d += kStep) {
      typename V::F lanes[kStep];
      if constexpr (kPairs) {
        V::load_transposed_bf16(rows + first, d, lanes);
      } else {
        V::load_transposed(rows + first, d, lanes);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kStep; ++i) store<V>(tile + (d + i) * kTileKeys<V> + first, lanes[i]);
      // W rows of a line take kDims / kStep steps of this loop.
      const int step = d % kDims / kStep;
      const int line = d / kDims * kDims;
      if constexpr (kFetches == 0) {
        if (step % kSteps == 0) {
          fetch_line(ahead[first + step / kSteps] + line);
          fetch_line(values_ahead[first + step / kSteps] + line);
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < kFetches; ++i) {
        fetch_line(ahead[first + step * kFetches + i] + line);
        fetch_line(values_ahead[first + step * kFetches + i] + line);
      }
    }
  }
}

// Head dims in one chain of a dot product; the chains are added up in order. Bounds the rounding
// error of long heads, which a single chain would let grow with the head dim.
constexpr int kDotChain = 32;

// N row-heads against one tile.
template <typename V, int N>
inline void score_rows(const float* tile, const float* q, int head_dim, float scale, float* out,
                       std::int64_t out_stride) {
  using F = typename V::F;
  for (int begin = 0; begin < head_dim; begin += kDotChain) {
    const int end = min_of(begin + kDotChain, head_dim);
    F low[N], high[N];
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) low[r] = high[r] = F{};
    for (int d = begin; d < end; ++d) {
      const F k_low = load<V>(tile + d * kTileKeys<V>);
      const F k_high = load<V>(tile + d * kTileKeys<V> + V::W);
#pragma GCC unroll 8
      for (int r = 0; r < N; ++r) {
        const F x = broadcast<V>(q[r * head_dim + d]);
        low[r] = V::fma(x, k_low, low[r]);
        high[r] = V::fma(x, k_high, high[r]);
      }
    }
    const float factor = end == head_dim ? scale : 1.0f;
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      float* to = out + r * out_stride;
      if (begin > 0) {
        low[r] += load<V>(to);
        high[r] += load<V>(to + V::W);
      }
      store<V>(to, low[r] * factor);
      store<V>(to + V::W, high[r] * factor);
    }
  }
}

template <typename T>
inline void fill_q(const AttentionBlock& block, float* q) {
  const SpecAttentionParams& p = *block.params;
  const int group = group_size(block), head_dim = p.cache.head_dim;
  const std::int64_t first_row = p.step.cu_rows[block.request];
  for (int i = 0; i < block.count; ++i) {
    const int row = (block.first + i) / group, head = (block.first + i) % group;
    const T* from = static_cast<const T*>(p.q) + (first_row + row) * p.q_row_stride +
                    static_cast<std::int64_t>(block.kv_head * group + head) * head_dim;
    for (int d = 0; d < head_dim; ++d) {
      if constexpr (sizeof(T) == 4) {
        q[i * head_dim + d] = from[d];
      } else if constexpr (std::is_same_v<T, Bf16>) {
        q[i * head_dim + d] = std::bit_cast<float>(static_cast<std::uint32_t>(from[d].bits) << 16);
      } else {
        q[i * head_dim + d] = f16_to_f32(from[d].bits);
      }
    }
  }
}

// V of so many bytes is fetched by the phase before the one that reads it. What is behind that the
// phase itself fetches ahead.
constexpr std::int64_t kFetchedValueBytes = 256 * 1024;

template <typename V, typename T>
inline void scores_of(const AttentionBlock& block, const RankScratch& scratch, int tile_begin,
                      int tile_end) {
  const SpecAttentionParams& p = *block.params;
  const int head_dim = p.cache.head_dim;
  const SlotReader<T> reader(block, p.cache.k, p.k_scale), values(block, p.cache.v, p.v_scale);
  const int shared_tiles = num_shared_tiles(block, kTileKeys<V>);
  const bool is_last_head = block.kv_head + 1 == p.cache.num_kv_heads;
  const int tiles = num_tiles(block, kTileKeys<V>);
  const auto fetched_keys = static_cast<int>(kFetchedValueBytes / sizeof(T)) / head_dim;
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    const KeyTile at = key_tile(block, tile, shared_tiles, kTileKeys<V>);
    const int keys = min_of(at.end - at.slot, kTileKeys<V>);
    // The next tile, whoever computes it: probably this thread. Behind the last one comes the first
    // one of the next head.
    const bool is_last = tile + 1 == tiles;
    const KeyTile then = key_tile(block, is_last ? 0 : tile + 1, shared_tiles, kTileKeys<V>);
    const int next_keys = is_last && is_last_head ? 0 : min_of(then.end - then.slot, kTileKeys<V>);
    const NextKeys next{then.slot, next_keys, is_last ? p.cache.stride_head : 0};
    fill_k_tile<V, T>(reader, tile * kTileKeys<V> < fetched_keys ? &values : nullptr, block,
                      at.slot, keys, next, head_dim, scratch.v_tile, scratch.k_tile);
    float* out = (at.own ? block.slot_scores : block.scores) + at.column;
    const std::int64_t stride = at.own ? kMaxStepTokens : block.stride;
    for (int i = first_reader(block, at); i < block.count; i += V::kScoreRows) {
      with_constant<V::kScoreRows>(min_of(block.count - i, V::kScoreRows), [&](auto n) {
        score_rows<V, n>(scratch.k_tile, scratch.q + i * head_dim, head_dim, p.scale,
                         out + i * stride, stride);
      });
    }
  }
}

// The same for the type that the call has.
inline void fill_q(const AttentionBlock& block, float* q) {
  switch (block.params->dtype) {
    case DType::kBF16:
      return fill_q<Bf16>(block, q);
    case DType::kF16:
      return fill_q<F16>(block, q);
    default:
      return fill_q<float>(block, q);
  }
}

template <typename V>
void scores(const AttentionBlock& block, const RankScratch& scratch, int tile_begin, int tile_end) {
  if (tile_begin >= tile_end) return;
  fill_q(block, scratch.q);
  switch (block.params->cache.dtype) {
    case DType::kBF16:
      return scores_of<V, Bf16>(block, scratch, tile_begin, tile_end);
    case DType::kF16:
      return scores_of<V, F16>(block, scratch, tile_begin, tile_end);
    case DType::kF8E4M3:
      return scores_of<V, E4m3>(block, scratch, tile_begin, tile_end);
    case DType::kI8:
      return scores_of<V, Int8>(block, scratch, tile_begin, tile_end);
    default:
      return scores_of<V, float>(block, scratch, tile_begin, tile_end);
  }
}

// -- Softmax -------------------------------------------------------------------------------------

template <typename V>
void softmax(const AttentionBlock& block, int begin, int end) {
  using F = typename V::F;
  const SpecAttentionParams& p = *block.params;
  const int group = group_size(block);
  std::int32_t slots[kMaxStepTokens];
  int row = -1, path = 0;
  RowRange range{0, 0, 0};
  for (int i = begin; i < end; ++i) {
    if ((block.first + i) / group != row) {
      row = (block.first + i) / group;
      range = row_range(block, row);
      if (block.is_tree) path = path_slots(block, row, slots);
    }
    float* s = block.scores + i * block.stride;
    if (block.is_tree) {
      const float* by_slot = block.slot_scores + static_cast<std::int64_t>(i) * kMaxStepTokens;
      for (int k = 0; k < path; ++k) s[block.kv_len - column_shift(block) + k] = by_slot[slots[k]];
    }
    const int low = range.low - column_shift(block), high = range.high - column_shift(block);
    const auto [first, last] = columns_of(block, range, V::W);
    if (p.softcap != 0.0f) {
      for (int j = first; j < last; j += V::W) {
        store<V>(s + j, tanh<V>(load<V>(s + j) / p.softcap) * p.softcap);
      }
    }
    for (int j = first + range.sink; j < low; ++j) s[j] = kMinusInfinity;
    for (int j = high; j < last; ++j) s[j] = kMinusInfinity;
    F best = broadcast<V>(kMinusInfinity);
    for (int j = first; j < last; j += V::W) best = max_lane<V>(load<V>(s + j), best);
    float top = max_lanes<V>(best);
    const float* sink =
        p.sinks != nullptr ? p.sinks + block.kv_head * group + (block.first + i) % group : nullptr;
    if (sink != nullptr && *sink > top) top = *sink;
    F sum = {};
    for (int j = first; j < last; j += V::W) {
      const F e = exp_nonpositive<V>(load<V>(s + j) - top);
      store<V>(s + j, e);
      sum += e;
    }
    float total = sum_lanes<V>(sum);
    if (sink != nullptr) {
      float lanes[V::W];
      store<V>(lanes, exp_nonpositive<V>(broadcast<V>(*sink - top)));
      total += lanes[0];
    }
    block.sums[i] = total;
  }
}

// -- Argmax --------------------------------------------------------------------------------------

// One pass over memory: the block that holds the first maximum is remembered and searched again.
template <typename V>
TokenId argmax_row(const float* scores, std::int32_t n) {
  using F = typename V::F;
  using I = typename V::I;
  constexpr int kBlock = 1024;
  float best = kMinusInfinity;
  std::int32_t best_block = 0;
  for (std::int32_t from = 0; from < n; from += kBlock) {
    const std::int32_t to = min_of(from + kBlock, n);
    float top = kMinusInfinity;
    bool is_nan = false;
    std::int32_t j = from;
    if (j + 4 * V::W <= to) {
      F high[4];
      I nan = {};
      for (int u = 0; u < 4; ++u) high[u] = broadcast<V>(kMinusInfinity);
      for (; j + 4 * V::W <= to; j += 4 * V::W) {
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u) {
          const F x = load<V>(scores + j + u * V::W);
          high[u] = max_lane<V>(x, high[u]);
          nan |= x != x;
        }
      }
      top = max_lanes<V>(max_lane<V>(max_lane<V>(high[0], high[1]), max_lane<V>(high[2], high[3])));
      for (int lane = 0; lane < V::W; ++lane) is_nan |= nan[lane] != 0;
    }
    for (; j < to; ++j) {
      is_nan |= scores[j] != scores[j];
      top = scores[j] > top ? scores[j] : top;
    }
    if (is_nan) return -1;
    if (top > best) {
      best = top;
      best_block = from;
    }
  }
  for (std::int32_t j = best_block; j < n; ++j) {
    if (scores[j] == best) return j;
  }
  return -1;  // unreachable for n >= 1
}

template <typename V>
constexpr AttentionKernels make_kernels() {
  return {kTileKeys<V>, &scores<V>, &softmax<V>, &values<V>, &argmax_row<V>};
}

}  // namespace
}  // namespace specdec::cpu
