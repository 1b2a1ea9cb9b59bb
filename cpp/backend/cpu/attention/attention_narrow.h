// Attention that multiplies in bfloat16, for calls that need not be exact and K/V in bf16: the text
// of attention_amx.cc and attention_avx512_bf16.cc, which bring the products.
//
// q, scaled, and the probabilities are rounded to bf16; scores, softmax and sums are float32.
// Blocks of few row-heads, other types of K/V and what a tree's rows see of each other take the
// exact kernels' way. Included once per instruction set, in an anonymous namespace.
//
// P is the instruction set:
//   P::Registers r;   what the products need, while it lives
//   P::scores(q, rows, head_dim, keys, out, stride)
//       out[row, 32 keys] = q[row, :] . keys; q as of fill_narrow_q, keys as of lay_out_keys
//   P::values(p, rows, v, steps, groups, is_first, acc, head_dim)
//       acc[row, 16 * groups head dims] (+)= p . v of 32 * steps keys, for up to 16 rows; p as of
//       lay_out_probabilities, v as of lay_out_values
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cpu/attention/attention_impl.h"
#include "backend/cpu/attention/attention_ops_avx512.h"

namespace specdec::cpu {
namespace {

constexpr int kLeastRowHeads = 8;           // fewer would fill less than half of a tile
constexpr int kTileRows = kNarrowRowHeads;  // of a tile; keys or head dims of another
constexpr int kKeys = 32;                   // of a score tile, and of a product with V
constexpr int kProductDims = 32;            // head dims of a product with K
constexpr int kTile = 256;                  // words of 4 bytes in a tile
constexpr int kStripe = 128;                // keys whose V is laid out for all row-heads at a time
constexpr int kMostSteps = kStripe / kKeys;
static_assert(multiplies_in_bf16(DType::kBF16, kProductDims));

bool is_narrow(const AttentionBlock& block) {
  const KvCacheView& cache = block.params->cache;
  return multiplies_in_bf16(cache.dtype, cache.head_dim) && block.count >= kLeastRowHeads;
}

// Two vectors of floats, the first one's in front.
inline __m512i narrowed(__m512 first, __m512 last) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(last, first));
}

// out[row-heads in whole tiles][head_dim] = q * scale in bf16, zeros behind the last.
void fill_narrow_q(const AttentionBlock& block, float* wide, std::uint16_t* out) {
  const int head_dim = block.params->cache.head_dim;
  fill_q(block, wide);
  const __m512 scale = _mm512_set1_ps(block.params->scale);
  const int numbers = block.count * head_dim;
  for (int i = 0; i < numbers; i += 32) {
    _mm512_storeu_si512(out + i, narrowed(_mm512_mul_ps(_mm512_loadu_ps(wide + i), scale),
                                          _mm512_mul_ps(_mm512_loadu_ps(wide + i + 16), scale)));
  }
  const int padded = (block.count + kTileRows - 1) / kTileRows * kTileRows * head_dim;
  std::fill(out + numbers, out + padded, std::uint16_t{0});
}

// out[group of 16 keys][step of 32 head dims][pair of head dims][key]: the tiles of K. The rows of
// the tile after this one are fetched ahead.
void lay_out_keys(const SlotReader<Bf16>& reader, const AttentionBlock& block, std::int32_t slot,
                  int keys, int next_keys, int head_dim, float* out) {
  const float *rows[kKeys], *ahead[kKeys];
  for (int j = 0; j < kKeys; ++j) {
    rows[j] = j < keys && is_read(block, slot + j)
                  ? reinterpret_cast<const float*>(reader(slot + j))
                  : kZeroRow;
    ahead[j] = j < next_keys ? reinterpret_cast<const float*>(reader(slot + kKeys + j)) : rows[j];
  }
  for (int first = 0; first < kKeys; first += kTileRows) {
    for (int pair = 0; pair < head_dim / 2; pair += 4, out += 4 * kTileRows) {
      Avx512::F lanes[4];
      Avx512::load_transposed(rows + first, pair, lanes);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        store<Avx512>(out + i * kTileRows, lanes[i]);
        fetch_line(ahead[first + pair % 16 + i] + pair / 16 * 16);
      }
    }
  }
}

template <typename P>
void narrow_scores(const AttentionBlock& block, const RankScratch& scratch, int tile_begin,
                   int tile_end) {
  if (!is_narrow(block)) {
    return attention_kernels_avx512().scores(block, scratch, tile_begin, tile_end);
  }
  if (tile_begin >= tile_end) return;
  const int head_dim = block.params->cache.head_dim;
  auto* q = reinterpret_cast<std::uint16_t*>(scratch.acc);
  fill_narrow_q(block, scratch.q, q);
  const SlotReader<Bf16> reader(block, block.params->cache.k, nullptr);
  const int shared_tiles = num_shared_tiles(block, kKeys);
  [[maybe_unused]] const typename P::Registers registers;
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    const KeyTile at = key_tile(block, tile, shared_tiles, kKeys);
    const int keys = min_of(at.end - at.slot, kKeys);
    const int next_keys = tile + 1 < tile_end ? min_of(at.end - at.slot - keys, kKeys) : 0;
    lay_out_keys(reader, block, at.slot, keys, next_keys, head_dim, scratch.k_tile);
    float* out = (at.own ? block.slot_scores : block.scores) + at.column;
    const std::int64_t stride = at.own ? kMaxStepTokens : block.stride;
    // In whole tiles of row-heads, as the operands lie.
    const int first = first_reader(block, at) / kTileRows * kTileRows;
    P::scores(q + first * head_dim, block.count - first, head_dim, scratch.k_tile,
              out + first * stride, stride);
  }
}

// out[step of 32 keys][group of 16 head dims][pair of keys][head dim][2]: the tiles of V, of
// columns [column, column + 32 * steps) and head dims [begin, end). Keys that no row sees are zero.
void lay_out_values(const SlotReader<Bf16>& reader, const AttentionBlock& block, int column,
                    int steps, int columns, int begin, int end, std::uint16_t* out) {
  const auto row_of = [&](int c) {
    const std::int32_t slot = c < block.head ? c : c + column_shift(block);
    return c < columns && is_read(block, slot) ? reader(slot)
                                               : reinterpret_cast<const Bf16*>(kZeroRow);
  };
  const int groups = (end - begin) / kTileRows;
  for (int pair = 0; pair < steps * kKeys / 2; ++pair) {
    const Bf16 *even = row_of(column + 2 * pair) + begin,
               *odd = row_of(column + 2 * pair + 1) + begin;
    const Bf16* ahead = row_of(column + 2 * pair + kStripe) + begin;
    const Bf16* next = row_of(column + 2 * pair + kStripe + 1) + begin;
    std::uint16_t* to = out + (pair / 16 * groups * kTile + pair % 16 * 16) * 2;
    for (int group = 0; group < groups; ++group, to += 2 * kTile) {
      const auto load = [&](const Bf16* row) {
        return _mm512_cvtepu16_epi32(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + group * kTileRows)));
      };
      _mm512_store_si512(to, _mm512_or_si512(load(even), _mm512_slli_epi32(load(odd), 16)));
      if (group % 2 == 0) {
        fetch_line(ahead + group * kTileRows);
        fetch_line(next + group * kTileRows);
      }
    }
  }
}

// out[step][16 row-heads][32 keys]: probabilities of `count` row-heads as tiles. `seen`: the
// columns that the softmax has written; what stands in others are scores.
void lay_out_probabilities(const float* scores, std::int64_t stride, const Columns* seen, int count,
                           int column, int steps, std::uint16_t* out) {
  for (int r = 0; r < kTileRows; ++r) {
    const float* row = scores + r * stride;
    for (int step = 0; step < steps; ++step) {
      const int at = column + step * kKeys;
      const auto load = [&](int c) {
        const bool is_seen = r < count && c >= seen[r].begin && c < seen[r].end;
        return is_seen ? _mm512_loadu_ps(row + c) : _mm512_setzero_ps();
      };
      _mm512_store_si512(out + step * 2 * kTile + r * kKeys, narrowed(load(at), load(at + 16)));
    }
  }
}

template <typename P>
void narrow_values(const AttentionBlock& block, const RankScratch& scratch, int dim_begin,
                   int dim_end) {
  const int head_dim = block.params->cache.head_dim;
  if (!is_narrow(block)) {
    return attention_kernels_avx512().values(block, scratch, dim_begin, dim_end);
  }
  const int end = min_of(dim_end, head_dim);
  if (dim_begin >= end) return;
  RowRange range[kMaxBlockRowHeads];
  fill_ranges(block, range);
  Columns seen[kMaxBlockRowHeads];
  int first = block.stride;
  for (int i = 0; i < block.count; ++i) {
    seen[i] = columns_of(block, range[i], Avx512::W);
    first = min_of(first, seen[i].begin);
  }
  const int columns = block.head + max_of(block.shared - block.base, 0);
  const int groups = (end - dim_begin) / kTileRows;
  auto* v = reinterpret_cast<std::uint16_t*>(scratch.v_tile);
  alignas(64) std::uint16_t p[kMostSteps * 2 * kTile];
  const SlotReader<Bf16> reader(block, block.params->cache.v, nullptr);
  if (first >= columns) {  // a tree behind nothing
    for (int i = 0; i < block.count; ++i) {
      std::fill(scratch.acc + i * head_dim + dim_begin, scratch.acc + i * head_dim + end, 0.0f);
    }
  }
  {
    [[maybe_unused]] const typename P::Registers registers;
    const int start = first / kKeys * kKeys;
    for (int column = start; column < columns; column += kStripe) {
      const int steps = min_of((columns - column + kKeys - 1) / kKeys, kMostSteps);
      lay_out_values(reader, block, column, steps, columns, dim_begin, end, v);
      for (int i = 0; i < block.count; i += kTileRows) {
        lay_out_probabilities(block.scores + i * block.stride, block.stride, seen + i,
                              block.count - i, column, steps, p);
        P::values(p, min_of(block.count - i, kTileRows), v, steps, groups, column == start,
                  scratch.acc + i * head_dim + dim_begin, head_dim);
      }
    }
  }
  if (block.is_tree) {
    const ValueReader<Avx512, Bf16, false> own(block, dim_begin, end);
    add_tree_values<Avx512>(block, own, range, scratch.v_tile, scratch.acc, head_dim);
  }
  write_out(block, scratch.acc, dim_begin, end);
}

template <typename P>
AttentionKernels narrow_kernels() {
  AttentionKernels table = attention_kernels_avx512();
  static_assert(kTileKeys<Avx512> == kKeys);
  table.scores = &narrow_scores<P>;
  table.values = &narrow_values<P>;
  return table;
}

}  // namespace
}  // namespace specdec::cpu
