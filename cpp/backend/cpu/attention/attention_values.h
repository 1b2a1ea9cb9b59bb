// The phase `values` of attention_kernels.h: probabilities times V, key by key. Part of
// attention_impl.h.
#pragma once

#include "backend/cpu/attention/attention_geometry.h"
#include "backend/cpu/attention/attention_math.h"

namespace specdec::cpu {
namespace {

// acc[r, x] += sum over n >= 1 keys of p[r, key] v[key, x]; N row-heads, M vectors of head dims.
// Row is float, or a 16-bit type that is widened in registers. v[k + ahead] is fetched for later
// (ahead = 0: nothing to fetch).
template <typename V, int N, int M, typename Row>
inline void add_values(const Row* const* v, int ahead, int d, int n, const float* p,
                       std::int64_t p_stride, float* acc, int acc_stride) {
  using F = typename V::F;
  F sum[N][M];
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
    for (int x = 0; x < M; ++x) sum[r][x] = load<V>(acc + r * acc_stride + d + x * V::W);
  }
  int k = 0;
  do {  // a loop that may run zero times would have the compiler spill the sums
    F value[M];
#pragma GCC unroll 8
    for (int x = 0; x < M; ++x) value[x] = load<V>(v[k] + d + x * V::W);
    if (ahead > 0) {
#pragma GCC unroll 8
      for (int x = 0; x < M; ++x) fetch_line(v[k + ahead] + d + x * V::W);
    }
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      const F weight = broadcast<V>(p[r * p_stride + k]);
#pragma GCC unroll 8
      for (int x = 0; x < M; ++x) sum[r][x] = V::fma(weight, value[x], sum[r][x]);
    }
  } while (++k < n);
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
    for (int x = 0; x < M; ++x) store<V>(acc + r * acc_stride + d + x * V::W, sum[r][x]);
  }
}

// The same for any number of keys, row-heads and head dims [begin, end), multiples of the vector
// width.
template <typename V, typename Row>
inline void add_values_of(const Row* const* v, int ahead, int begin, int end, int n, const float* p,
                          std::int64_t p_stride, int rows, float* acc, int acc_stride) {
  if (n <= 0) return;
  for (int r = 0; r < rows; r += V::kValueRows) {
    with_constant<V::kValueRows>(min_of(rows - r, V::kValueRows), [&](auto row_count) {
      for (int d = begin; d < end; d += V::kValueVectors * V::W) {
        with_constant<V::kValueVectors>(
            min_of((end - d) / V::W, V::kValueVectors), [&](auto vectors) {
              add_values<V, row_count, vectors>(v, ahead, d, n, p + r * p_stride, p_stride,
                                                acc + r * acc_stride, acc_stride);
            });
      }
    });
  }
}

struct Span {
  std::int32_t low, high;
};

// Keys whose V is used by all row-heads before the next are read: as many as half of the nearest
// cache holds, so that sums are rarely loaded and stored.
constexpr int kLeastValueBlock = 32, kMostValueBlock = 128;
constexpr int kValueBlockFloats = 4096;
inline int value_block(int dims) {
  return min_of(max_of(kValueBlockFloats / dims, kLeastValueBlock), kMostValueBlock);
}

// Whether rows of V are read where they lie, in whole vectors. Otherwise they are converted into a
// tile first, which pays where several groups of row-heads read it.
template <typename V, typename T>
inline bool reads_in_place(const AttentionBlock& block) {
  const bool is_whole = block.params->cache.head_dim % V::W == 0;
  return is_whole && (sizeof(T) == 4 || (sizeof(T) == 2 && block.count <= V::kValueRows));
}

// Rows of V, in place or as float32.
template <typename V, typename T, bool kInPlace>
struct ValueReader {
  using Row = std::conditional_t<kInPlace, T, float>;

  ValueReader(const AttentionBlock& block, int begin_, int end_)
      : slots(block, block.params->cache.v, block.params->v_scale),
        begin(begin_),
        end(end_),
        head_dim(block.params->cache.head_dim),
        tile_stride((head_dim + kDimChunk - 1) / kDimChunk * kDimChunk) {}

  // The rows of the slots [slot, slot + n). Conversion fetches those of the block after it, up to
  // slot `last`, ahead; rows read in place are fetched by add_values.
  void read(std::int32_t slot, int n, std::int32_t last, float* tile, const Row** rows) const {
    for (int k = 0; k < n; ++k) {
      const T* from = slots(slot + k);
      if constexpr (kInPlace) {
        rows[k] = from;
      } else {
        if (slot + n + k < last) {
          const T* next = slots(slot + n + k);
          for (int d = begin; d < end; d += 64 / sizeof(T)) fetch_line(next + d);
        }
        float* to = tile + k * tile_stride;
        rows[k] = to;
        widen_row<V>(from, slots.factor(from), begin, end, head_dim, to);
      }
    }
  }

  // Puts where the next n rows lie behind the `used` ones of the array, for prefetching. Returns
  // how far ahead in the array that is, 0 if it is not worth it.
  int rows_ahead(std::int32_t slot, int n, int used, const Row** rows) const {
    if constexpr (kInPlace) {
      for (int k = 0; k < used; ++k) rows[used + k] = k < n ? slots(slot + k) : rows[k];
      return used;
    }
    return 0;
  }

  SlotReader<T> slots;
  int begin, end, head_dim, tile_stride;
};

inline void fill_ranges(const AttentionBlock& block, RowRange* range) {
  const int group = group_size(block);
  for (int i = 0; i < block.count; ++i) {
    const int row = (block.first + i) / group;
    range[i] = i > 0 && row == (block.first + i - 1) / group ? range[i - 1] : row_range(block, row);
  }
}

// Adds what a tree's rows see of each other to acc.
template <typename V, typename Reader>
inline void add_tree_values(const AttentionBlock& block, const Reader& reader,
                            const RowRange* range, float* v_tile, float* acc, int acc_stride) {
  const int group = group_size(block);
  const typename Reader::Row *rows[kMaxStepTokens], *by_slot[kMaxStepTokens];
  reader.read(block.kv_len, block.num_rows, 0, v_tile, by_slot);
  std::int32_t slots[kMaxStepTokens];
  for (int i = 0; i < block.count;) {
    const int row = (block.first + i) / group;
    int next = i + 1;
    while (next < block.count && (block.first + next) / group == row) ++next;
    const int length = path_slots(block, row, slots);
    for (int k = 0; k < length; ++k) rows[k] = by_slot[slots[k]];
    const int skip = max_of(range[i].low - block.kv_len, 0);  // ancestors behind the window
    const int sinks = max_of(range[i].sink - block.kv_len, 0);
    const float* p = block.scores + i * block.stride + (block.kv_len - column_shift(block));
    if (sinks > 0) {
      add_values_of<V>(rows, 0, reader.begin, reader.end, sinks, p, block.stride, next - i,
                       acc + i * acc_stride, acc_stride);
    }
    add_values_of<V>(rows + skip, 0, reader.begin, reader.end, length - skip, p + skip,
                     block.stride, next - i, acc + i * acc_stride, acc_stride);
    i = next;
  }
}

template <typename V, typename T, bool kInPlace>
inline void values_with(const AttentionBlock& block, const RankScratch& scratch, int dim_begin,
                        int dim_end) {
  const int head_dim = block.params->cache.head_dim;
  // In whole vectors; the lanes past the head dim are zero and never stored.
  const int acc_stride = (head_dim + kDimChunk - 1) / kDimChunk * kDimChunk;
  const int end = dim_begin + (min_of(dim_end, head_dim) - dim_begin + V::W - 1) / V::W * V::W;
  const ValueReader<V, T, kInPlace> reader(block, dim_begin, end);
  float* acc = scratch.acc;
  for (int i = 0; i < block.count; ++i) {
    for (int d = dim_begin; d < end; ++d) acc[i * acc_stride + d] = 0.0f;
  }

  RowRange range[kMaxBlockRowHeads];
  fill_ranges(block, range);
  const typename decltype(reader)::Row* rows[kMaxStepTokens];
  std::int32_t lowest = block.shared;
  for (int i = 0; i < block.count; ++i) lowest = min_of(lowest, range[i].low);
  lowest = max_of(lowest, block.low);
  // Rows that one group of row-heads reads need not stay in the nearest cache.
  const bool is_read_once = kInPlace && block.count <= V::kValueRows;
  const int keys = is_read_once ? 2 * kLeastValueBlock : value_block(end - dim_begin);
  static_assert(4 * kLeastValueBlock <= kMaxStepTokens);  // `rows` holds two blocks
  static_assert(kMostValueBlock <= kMaxStepTokens);
  // Positions [begin, last), of which a row-head sees what seen() says.
  const auto add_shared = [&](std::int32_t begin, std::int32_t last, std::int32_t shift,
                              auto&& seen) {
    for (std::int32_t from = begin; from < last; from += keys) {
      const std::int32_t to = min_of(from + keys, last);
      reader.read(from, to - from, last, scratch.v_tile, rows);
      // The next block's rows follow in the array; they are fetched while these are used.
      const int ahead =
          is_read_once ? reader.rows_ahead(to, min_of(keys, last - to), to - from, rows) : 0;
      // Runs of row-heads that see the same part of this block of keys.
      for (int i = 0; i < block.count;) {
        const Span all = seen(range[i]), part{max_of(all.low, from), min_of(all.high, to)};
        int next = i + 1;
        for (; next < block.count; ++next) {
          const Span other = seen(range[next]);
          if (max_of(other.low, from) != part.low || min_of(other.high, to) != part.high) break;
        }
        if (part.low < part.high) {
          add_values_of<V>(rows + (part.low - from), ahead, dim_begin, end, part.high - part.low,
                           block.scores + i * block.stride + (part.low - shift), block.stride,
                           next - i, acc + i * acc_stride, acc_stride);
        }
        i = next;
      }
    }
  };
  std::int32_t sink = 0;
  for (int i = 0; i < block.count; ++i) sink = max_of(sink, range[i].sink);
  add_shared(0, min_of(sink, block.shared), 0, [](const RowRange& r) { return Span{0, r.sink}; });
  add_shared(lowest, block.shared, column_shift(block),
             [](const RowRange& r) { return Span{r.low, r.high}; });

  if (block.is_tree) add_tree_values<V>(block, reader, range, scratch.v_tile, acc, acc_stride);
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

// To q's type.
inline void write_out(const AttentionBlock& block, const float* acc, int begin, int end) {
  switch (block.params->dtype) {
    case DType::kBF16:
      return write_out<Bf16>(block, acc, begin, end);
    case DType::kF16:
      return write_out<F16>(block, acc, begin, end);
    default:
      return write_out<float>(block, acc, begin, end);
  }
}

template <typename V, typename T>
inline void values_of(const AttentionBlock& block, const RankScratch& scratch, int dim_begin,
                      int dim_end) {
  if constexpr (sizeof(T) > 1) {
    if (reads_in_place<V, T>(block)) {
      return values_with<V, T, true>(block, scratch, dim_begin, dim_end);
    }
  }
  values_with<V, T, false>(block, scratch, dim_begin, dim_end);
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
    case DType::kF8E4M3:
      values_of<V, E4m3>(block, scratch, dim_begin, dim_end);
      break;
    case DType::kI8:
      values_of<V, Int8>(block, scratch, dim_begin, dim_end);
      break;
    default:
      values_of<V, float>(block, scratch, dim_begin, dim_end);
  }
  write_out(block, scratch.acc, dim_begin, dim_end);
}

}  // namespace
}  // namespace specdec::cpu
