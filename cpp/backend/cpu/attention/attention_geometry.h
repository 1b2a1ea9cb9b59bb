// Which keys the rows of a block see, and where they lie. Part of attention_impl.h.
#pragma once

#include <cstring>
#include <type_traits>

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
inline int max_of(int a, int b) { return a > b ? a : b; }

// One row of the block: which positions it sees.
struct RowRange {
  std::int32_t low, high;  // visible positions [low, high); high - 1 is the row itself
  std::int32_t sink;       // and [0, sink), where that is apart from them; 0: nothing else
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
  const std::int32_t behind = window > 0 && position >= window ? position - window + 1 : 0;
  const std::int32_t low = max_of(behind, block.params->first_key);
  const std::int32_t sink = block.params->sink_tokens;
  return low <= sink ? RowRange{0, position + 1, 0} : RowRange{low, position + 1, sink};
}

// Columns [begin, end) of a row of scores: in whole vectors of `width`, all that it sees.
struct Columns {
  int begin, end;
};
inline Columns columns_of(const AttentionBlock& block, const RowRange& range, int width) {
  const int low = range.low - column_shift(block), high = range.high - column_shift(block);
  return {range.sink > 0 ? 0 : low / width * width, (high + width - 1) / width * width};
}

// Whether any row of the block may see a position; a page of the others may be somebody else's.
inline bool is_read(const AttentionBlock& block, std::int32_t position) {
  return position < block.sink || position >= block.low;
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

// Where the K (or V) of a token slot of the request lies, and what its numbers are multiplied by.
template <typename T>
struct SlotReader {
  // scales: of e4m3, as in SpecAttentionParams
  SlotReader(const AttentionBlock& block, const void* pool, const float* scales) {
    const SpecAttentionParams& p = *block.params;
    const KvCacheView& cache = p.cache;
    head_dim = cache.head_dim;
    const float scale = scales == nullptr ? 1.0f : scales[block.kv_head * p.scale_stride];
    head_factor = scale * kE4m3Factor;
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
  // Where the n slots from `slot` on lie, each `apart` elements further. A page is looked up once.
  void find(std::int32_t slot, int n, std::int64_t apart, const T** rows) const {
    for (int j = 0; j < n;) {
      const T* row = (*this)(slot + j) + apart;
      const int end = min_of(n, j + in_page + 1 - ((slot + j) & in_page));
      for (; j < end; ++j, row += stride_token) rows[j] = row;
    }
  }
  float factor(const T* vector) const {
    if constexpr (std::is_same_v<T, Int8>) {
      float scale;
      std::memcpy(&scale, vector + head_dim, sizeof(scale));
      return scale;
    }
    return head_factor;  // floats have none and take no notice
  }
  const T* base;
  int head_dim;
  float head_factor;
  const std::int32_t* pages;
  int shift;
  std::int32_t in_page;
  std::int64_t stride_page, stride_token;
};

// Where the keys of a score tile lie.
struct KeyTile {
  bool own;                // of the tree's rows
  int column;              // of the first one in slot_scores if own, else in scores
  std::int32_t slot, end;  // of the first key, and the first one behind the last of its kind
};

inline KeyTile key_tile(const AttentionBlock& block, int tile, int shared_tiles, int tile_keys) {
  const bool own = tile >= shared_tiles;
  const int column = (own ? tile - shared_tiles : tile) * tile_keys;
  const bool first = !own && column < block.head;  // of the sinks' columns
  if (own) return {true, column, block.kv_len + column, block.kv_len + block.num_rows};
  if (first) return {false, column, column, block.head};
  return {false, column, column + column_shift(block), block.shared};
}

// The first row-head that sees a key of the tile. Those before it belong to rows of the prompt in
// front of the tile's first key.
inline int first_reader(const AttentionBlock& block, const KeyTile& tile) {
  if (block.is_tree || tile.slot <= block.kv_len) return 0;
  return max_of(0, (tile.slot - block.kv_len) * group_size(block) - block.first);
}

}  // namespace
}  // namespace specdec::cpu
