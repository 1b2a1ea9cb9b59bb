// The text of every AttentionKernels table; see attention_kernels.h for what the phases compute.
// Included once per instruction set, in an anonymous namespace (see attention_math.h).
#pragma once

#include <utility>

#include "backend/cpu/attention/attention_kernels.h"
#include "backend/cpu/attention/attention_math.h"

namespace specdec::cpu {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

// Calls f(integral constant of the value of n), 1 <= n <= Max.
template <int Max, typename F>
inline void with_constant(int n, F&& f) {
  if constexpr (Max > 1) {
    if (n < Max) return with_constant<Max - 1>(n, f);
  }
  f(std::integral_constant<int, Max>{});
}

inline int min_of(int a, int b) { return a < b ? a : b; }
inline int max_of_int(int a, int b) { return a > b ? a : b; }

// -- Geometry ------------------------------------------------------------------------------------

// One row of the block: which positions it sees. Columns are relative to block.base.
struct RowRange {
  std::int32_t low, high;  // visible positions [low, high); high - 1 is the row itself
};

inline const std::uint32_t* mask_row(const AttentionBlock& block, int row) {
  const StepView& step = block.params->step;
  return step.mask + static_cast<std::int64_t>(step.cu_rows[block.request] + row) * kMaskWords;
}

inline int group_size(const AttentionBlock& block) {
  return block.params->num_heads / block.params->cache.num_kv_heads;
}

inline RowRange row_range(const AttentionBlock& block, int row) {
  int depth = row;
  if (block.is_tree) {
    depth = -1;
    const std::uint32_t* mask = mask_row(block, row);
    for (int w = 0; w < kMaskWords; ++w) depth += __builtin_popcount(mask[w]);
  }
  const std::int32_t position = block.kv_len + depth;
  const std::int32_t window = block.params->sliding_window;
  return {window > 0 && position >= window ? position - window + 1 : 0, position + 1};
}

// Slots of the row's ancestors and itself in depth order; returns how many.
inline int path_slots(const AttentionBlock& block, int row, std::int32_t* slots) {
  const std::uint32_t* mask = mask_row(block, row);
  int n = 0;
  for (int w = 0; w < kMaskWords; ++w) {
    for (std::uint32_t bits = mask[w]; bits != 0; bits &= bits - 1) {
      slots[n++] = w * 32 + __builtin_ctz(bits);
    }
  }
  return n;
}

// Where the K (or V) of a token slot of the request lies.
template <typename T>
struct SlotReader {
  SlotReader(const AttentionBlock& block, const void* pool) {
    const SpecAttentionParams& p = *block.params;
    const KvCacheView& cache = p.cache;
    base = static_cast<const T*>(pool) + p.layer * cache.stride_layer +
           block.kv_head * cache.stride_head;
    pages = p.step.page_table + static_cast<std::int64_t>(block.request) * p.step.page_table_stride;
    shift = __builtin_ctz(static_cast<unsigned>(cache.page_size));
    in_page = cache.page_size - 1;
    stride_page = cache.stride_page;
    stride_token = cache.stride_token;
  }
  const T* operator()(std::int32_t slot) const {
    return base + pages[slot >> shift] * stride_page + (slot & in_page) * stride_token;
  }
  const T* base;
  const std::int32_t* pages;
  int shift;
  std::int32_t in_page;
  std::int64_t stride_page, stride_token;
};

// -- Scores --------------------------------------------------------------------------------------

template <typename V>
constexpr int kTileKeys = 2 * V::W;

alignas(64) constexpr float kZeroRow[256] = {};

// tile[d, j] = key j's head dim d; columns past `keys` are zero. `wide` is room for kTileKeys rows
// of float32. The tile after this one (`next_keys` keys) is fetched ahead: its rows are 16 to 32
// short streams, which the hardware does not follow by itself.
template <typename V, typename T>
inline void fill_k_tile(const SlotReader<T>& reader, std::int32_t slot, int keys, int next_keys,
                        int head_dim, float* wide, float* tile) {
  const float* rows[kTileKeys<V>];
  for (int j = 0; j < keys; ++j) {
    const T* from = reader(slot + j);
    if (j < next_keys) {
      const T* next = reader(slot + kTileKeys<V> + j);
      for (int d = 0; d < head_dim; d += 64 / sizeof(T)) __builtin_prefetch(next + d);
    }
    if constexpr (sizeof(T) == 4) {
      rows[j] = from;
    } else {
      float* to = wide + j * head_dim;
      rows[j] = to;
      int d = 0;
      for (; d + V::W <= head_dim; d += V::W) store<V>(to + d, load<V>(from + d));
      if (d < head_dim) {
        const typename V::F rest = V::load_half(from + d);
        std::memcpy(to + d, &rest, sizeof(rest) / 2);
      }
    }
  }
  for (int j = keys; j < kTileKeys<V>; ++j) rows[j] = kZeroRow;
  for (int first = 0; first < kTileKeys<V>; first += V::W) {
    for (int d = 0; d < head_dim; d += 4) {
      typename V::F lanes[4];
      V::load_transposed(rows + first, d, lanes);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) store<V>(tile + (d + i) * kTileKeys<V> + first, lanes[i]);
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

template <typename V, typename T>
inline void scores_of(const AttentionBlock& block, const RankScratch& scratch, int tile_begin,
                      int tile_end) {
  const SpecAttentionParams& p = *block.params;
  const int head_dim = p.cache.head_dim;
  const SlotReader<T> reader(block, p.cache.k);
  const int shared_tiles = num_shared_tiles(block, kTileKeys<V>);
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    const bool own = tile >= shared_tiles;  // the tree's own rows, by slot
    const int column = (own ? tile - shared_tiles : tile) * kTileKeys<V>;
    const std::int32_t slot = column + (own ? block.kv_len : block.base);
    const std::int32_t end = own ? block.kv_len + block.num_rows : block.shared;
    const int keys = min_of(end - slot, kTileKeys<V>);
    const int next_keys = min_of(end - slot - keys, kTileKeys<V>);
    fill_k_tile<V, T>(reader, slot, keys, tile + 1 < tile_end ? next_keys : 0, head_dim,
                      scratch.v_tile, scratch.k_tile);
    float* out = (own ? block.slot_scores : block.scores) + column;
    const std::int64_t stride = own ? kMaxStepTokens : block.stride;
    for (int i = 0; i < block.count; i += V::kScoreRows) {
      with_constant<V::kScoreRows>(min_of(block.count - i, V::kScoreRows), [&](auto n) {
        score_rows<V, n>(scratch.k_tile, scratch.q + i * head_dim, head_dim, p.scale,
                         out + i * stride, stride);
      });
    }
  }
}

template <typename V>
void scores(const AttentionBlock& block, const RankScratch& scratch, int tile_begin, int tile_end) {
  if (tile_begin >= tile_end) return;
  switch (block.params->dtype) {
    case DType::kBF16:
      fill_q<Bf16>(block, scratch.q);
      break;
    case DType::kF16:
      fill_q<F16>(block, scratch.q);
      break;
    default:
      fill_q<float>(block, scratch.q);
  }
  switch (block.params->cache.dtype) {
    case DType::kBF16:
      return scores_of<V, Bf16>(block, scratch, tile_begin, tile_end);
    case DType::kF16:
      return scores_of<V, F16>(block, scratch, tile_begin, tile_end);
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
  RowRange range{0, 0};
  for (int i = begin; i < end; ++i) {
    if ((block.first + i) / group != row) {
      row = (block.first + i) / group;
      range = row_range(block, row);
      if (block.is_tree) path = path_slots(block, row, slots);
    }
    float* s = block.scores + i * block.stride;
    if (block.is_tree) {
      const float* by_slot = block.slot_scores + static_cast<std::int64_t>(i) * kMaxStepTokens;
      for (int k = 0; k < path; ++k) s[block.kv_len - block.base + k] = by_slot[slots[k]];
    }
    const int low = range.low - block.base, high = range.high - block.base;
    const int first = low / V::W * V::W, last = (high + V::W - 1) / V::W * V::W;
    if (p.softcap != 0.0f) {
      for (int j = first; j < last; j += V::W) {
        store<V>(s + j, tanh<V>(load<V>(s + j) / p.softcap) * p.softcap);
      }
    }
    for (int j = first; j < low; ++j) s[j] = kMinusInfinity;
    for (int j = high; j < last; ++j) s[j] = kMinusInfinity;
    F best = broadcast<V>(kMinusInfinity);
    for (int j = first; j < last; j += V::W) best = max_of<V>(load<V>(s + j), best);
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

// -- Values --------------------------------------------------------------------------------------

// acc[r, x] += sum over n keys of p[r, key] v[key, x]; N row-heads, M vectors of head dims.
template <typename V, int N, int M>
inline void add_values(const float* const* v, int d, int n, const float* p, std::int64_t p_stride,
                       float* acc, int acc_stride) {
  using F = typename V::F;
  F sum[N][M];
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
    for (int x = 0; x < M; ++x) sum[r][x] = load<V>(acc + r * acc_stride + d + x * V::W);
  }
  for (int k = 0; k < n; ++k) {
    F value[M];
#pragma GCC unroll 8
    for (int x = 0; x < M; ++x) value[x] = load<V>(v[k] + d + x * V::W);
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      const F weight = broadcast<V>(p[r * p_stride + k]);
#pragma GCC unroll 8
      for (int x = 0; x < M; ++x) sum[r][x] = V::fma(weight, value[x], sum[r][x]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
    for (int x = 0; x < M; ++x) store<V>(acc + r * acc_stride + d + x * V::W, sum[r][x]);
  }
}

// The same for any number of row-heads and head dims [begin, end), multiples of the vector width.
template <typename V>
inline void add_values_of(const float* const* v, int begin, int end, int n, const float* p,
                          std::int64_t p_stride, int rows, float* acc, int acc_stride) {
  for (int r = 0; r < rows; r += V::kValueRows) {
    with_constant<V::kValueRows>(min_of(rows - r, V::kValueRows), [&](auto row_count) {
      for (int d = begin; d < end; d += V::kValueVectors * V::W) {
        with_constant<V::kValueVectors>(
            min_of((end - d) / V::W, V::kValueVectors), [&](auto vectors) {
              add_values<V, row_count, vectors>(v, d, n, p + r * p_stride, p_stride,
                                                acc + r * acc_stride, acc_stride);
            });
      }
    });
  }
}

// Rows of V as float32, readable in whole vectors: in place, or converted into a tile.
template <typename V, typename T>
struct ValueReader {
  ValueReader(const AttentionBlock& block, int begin_, int end_)
      : slots(block, block.params->cache.v),
        begin(begin_),
        end(end_),
        head_dim(block.params->cache.head_dim),
        tile_stride((head_dim + kDimChunk - 1) / kDimChunk * kDimChunk),
        in_place(sizeof(T) == 4 && head_dim % V::W == 0) {}

  void read(std::int32_t slot, int n, float* tile, const float** rows) const {
    for (int k = 0; k < n; ++k) {
      const T* from = slots(slot + k);
      if constexpr (sizeof(T) == 4) {
        if (in_place) {
          rows[k] = from;
          continue;
        }
      }
      float* to = tile + k * tile_stride;
      rows[k] = to;
      for (int d = begin; d < end; d += V::W) {
        store<V>(to + d, d + V::W <= head_dim ? load<V>(from + d) : V::load_half(from + d));
      }
    }
  }

  void fetch_ahead(std::int32_t slot, int n) const {
    for (int k = 0; k < n; ++k) {
      const T* from = slots(slot + k);
      for (int d = begin; d < end; d += 64 / sizeof(T)) __builtin_prefetch(from + d);
    }
  }

  SlotReader<T> slots;
  int begin, end, head_dim, tile_stride;
  bool in_place;
};

constexpr int kValueBlock = 32;  // keys whose V is used by all row-heads before the next are read

template <typename V, typename T>
inline void values_of(const AttentionBlock& block, const RankScratch& scratch, int dim_begin,
                      int dim_end) {
  const int group = group_size(block);
  const int head_dim = block.params->cache.head_dim;
  // In whole vectors; the lanes past the head dim are zero and never stored.
  const int acc_stride = (head_dim + kDimChunk - 1) / kDimChunk * kDimChunk;
  const int end = dim_begin + (min_of(dim_end, head_dim) - dim_begin + V::W - 1) / V::W * V::W;
  const ValueReader<V, T> reader(block, dim_begin, end);
  float* acc = scratch.acc;
  for (int i = 0; i < block.count; ++i) {
    for (int d = dim_begin; d < end; ++d) acc[i * acc_stride + d] = 0.0f;
  }

  RowRange range[kMaxBlockRowHeads];
  for (int i = 0; i < block.count; ++i) {
    const int row = (block.first + i) / group;
    range[i] = i > 0 && row == (block.first + i - 1) / group ? range[i - 1] : row_range(block, row);
  }

  const float* rows[kMaxStepTokens];
  std::int32_t lowest = block.shared;
  for (int i = 0; i < block.count; ++i) lowest = min_of(lowest, range[i].low);
  lowest = max_of_int(lowest, block.base);
  for (std::int32_t from = lowest; from < block.shared; from += kValueBlock) {
    const std::int32_t to = min_of(from + kValueBlock, block.shared);
    reader.read(from, to - from, scratch.v_tile, rows);
    reader.fetch_ahead(to, min_of(to + kValueBlock, block.shared) - to);
    // Runs of row-heads that see the same part of this block of keys.
    for (int i = 0; i < block.count;) {
      const std::int32_t low = max_of_int(range[i].low, from), high = min_of(range[i].high, to);
      int next = i + 1;
      while (next < block.count && max_of_int(range[next].low, from) == low &&
             min_of(range[next].high, to) == high) {
        ++next;
      }
      if (low < high) {
        add_values_of<V>(rows + (low - from), dim_begin, end, high - low,
                         block.scores + i * block.stride + (low - block.base), block.stride,
                         next - i, acc + i * acc_stride, acc_stride);
      }
      i = next;
    }
  }

  if (block.is_tree) {
    const float* by_slot[kMaxStepTokens];
    reader.read(block.kv_len, block.num_rows, scratch.v_tile, by_slot);
    std::int32_t slots[kMaxStepTokens];
    for (int i = 0; i < block.count;) {
      const int row = (block.first + i) / group;
      int next = i + 1;
      while (next < block.count && (block.first + next) / group == row) ++next;
      const int length = path_slots(block, row, slots);
      for (int k = 0; k < length; ++k) rows[k] = by_slot[slots[k]];
      const int skip = max_of_int(range[i].low - block.kv_len, 0);  // ancestors behind the window
      add_values_of<V>(rows + skip, dim_begin, end, length - skip,
                       block.scores + i * block.stride + (block.kv_len - block.base + skip),
                       block.stride, next - i, acc + i * acc_stride, acc_stride);
      i = next;
    }
  }
}

template <typename T>
inline void write_out(const AttentionBlock& block, const float* acc, int begin, int end) {
  const SpecAttentionParams& p = *block.params;
  const int group = group_size(block), head_dim = p.cache.head_dim;
  const int acc_stride = (head_dim + kDimChunk - 1) / kDimChunk * kDimChunk;
  const std::int64_t first_row = p.step.cu_rows[block.request];
  end = min_of(end, head_dim);
  for (int i = 0; i < block.count; ++i) {
    const int row = (block.first + i) / group, head = (block.first + i) % group;
    T* to = static_cast<T*>(p.out) + (first_row + row) * p.out_row_stride +
            static_cast<std::int64_t>(block.kv_head * group + head) * head_dim;
    const float* from = acc + i * acc_stride;
    const float sum = block.sums[i];
    for (int d = begin; d < end; ++d) store_element(to + d, from[d] / sum);
  }
}

template <typename V>
void values(const AttentionBlock& block, const RankScratch& scratch, int dim_begin, int dim_end) {
  if (dim_begin >= dim_end) return;
  switch (block.params->cache.dtype) {
    case DType::kBF16:
      values_of<V, Bf16>(block, scratch, dim_begin, dim_end);
      break;
    case DType::kF16:
      values_of<V, F16>(block, scratch, dim_begin, dim_end);
      break;
    default:
      values_of<V, float>(block, scratch, dim_begin, dim_end);
  }
  switch (block.params->dtype) {
    case DType::kBF16:
      return write_out<Bf16>(block, scratch.acc, dim_begin, dim_end);
    case DType::kF16:
      return write_out<F16>(block, scratch.acc, dim_begin, dim_end);
    default:
      return write_out<float>(block, scratch.acc, dim_begin, dim_end);
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
          high[u] = max_of<V>(x, high[u]);
          nan |= x != x;
        }
      }
      top = max_lanes<V>(max_of<V>(max_of<V>(high[0], high[1]), max_of<V>(high[2], high[3])));
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
