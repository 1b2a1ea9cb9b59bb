// Attention in bfloat16 with the tile instructions (AMX).
#include <cstring>

#include "backend/cpu/attention/attention_narrow.h"
#include "backend/cpu/linear/amx_config.h"

namespace specdec::cpu {
namespace {

static_assert(kTileRows == kAmxRows);

// All registers whole, while it lives.
class WholeTiles {
 public:
  WholeTiles() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, kAmxRows, 64);
    written_for_tiles(&config);
    _tile_loadconfig(&config);
  }
  ~WholeTiles() { _tile_release(); }
  WholeTiles(const WholeTiles&) = delete;
  WholeTiles& operator=(const WholeTiles&) = delete;
};

// Scores of 16 or 32 row-heads and 32 keys.
template <bool kTwoGroups>
void score_tiles(const std::uint16_t* q, int head_dim, const float* keys, float* out,
                 std::int64_t stride) {
  const std::int64_t q_bytes = head_dim * 2, out_bytes = stride * 4;
  const int steps = head_dim / kProductDims;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwoGroups) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int step = 0; step < steps; ++step) {
    _tile_loadd(4, q + step * kProductDims, q_bytes);
    _tile_loadd(6, keys + step * kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, keys + (steps + step) * kTile, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwoGroups) {
      _tile_loadd(5, q + kAmxRows * head_dim + step * kProductDims, q_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, out_bytes);
  _tile_stored(1, out + kAmxRows, out_bytes);
  if constexpr (kTwoGroups) {
    _tile_stored(2, out + kAmxRows * stride, out_bytes);
    _tile_stored(3, out + kAmxRows * stride + kAmxRows, out_bytes);
  }
}

// acc[16 row-heads][head dims of up to four groups] += probabilities * V.
template <int kGroups>
void value_tiles(const std::uint16_t* p, const std::uint16_t* v, int steps, std::int64_t step_words,
                 bool is_first, float* acc, std::int64_t acc_stride) {
  const std::int64_t bytes = acc_stride * 4;
  if (is_first) {
    _tile_zero(0);
    if constexpr (kGroups > 1) _tile_zero(1);
    if constexpr (kGroups > 2) _tile_zero(2);
    if constexpr (kGroups > 3) _tile_zero(3);
  } else {
    _tile_loadd(0, acc, bytes);
    if constexpr (kGroups > 1) _tile_loadd(1, acc + kAmxRows, bytes);
    if constexpr (kGroups > 2) _tile_loadd(2, acc + 2 * kAmxRows, bytes);
    if constexpr (kGroups > 3) _tile_loadd(3, acc + 3 * kAmxRows, bytes);
  }
  for (int step = 0; step < steps; ++step, p += 2 * kTile, v += step_words) {
    _tile_loadd(4, p, 64);
    _tile_loadd(5, v, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kGroups > 1) {
      _tile_loadd(6, v + 2 * kTile, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kGroups > 2) {
      _tile_loadd(7, v + 4 * kTile, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (kGroups > 3) {
      _tile_loadd(5, v + 6 * kTile, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, acc, bytes);
  if constexpr (kGroups > 1) _tile_stored(1, acc + kAmxRows, bytes);
  if constexpr (kGroups > 2) _tile_stored(2, acc + 2 * kAmxRows, bytes);
  if constexpr (kGroups > 3) _tile_stored(3, acc + 3 * kAmxRows, bytes);
}

struct Tiles {
  using Registers = WholeTiles;

  static void scores(const std::uint16_t* q, int rows, int head_dim, const float* keys, float* out,
                     std::int64_t stride) {
    written_for_tiles(keys);
    written_for_tiles(q);
    for (int i = 0; i < rows;) {
      const int left = rows - i;
      const std::uint16_t* from = q + i * head_dim;
      if (left >= 2 * kAmxRows) {
        score_tiles<true>(from, head_dim, keys, out + i * stride, stride);
        i += 2 * kAmxRows;
      } else if (left >= kAmxRows) {
        score_tiles<false>(from, head_dim, keys, out + i * stride, stride);
        i += kAmxRows;
      } else {  // there are no rows behind the last to write to
        alignas(64) float last[kAmxRows * kKeys];
        score_tiles<false>(from, head_dim, keys, last, kKeys);
        written_for_tiles(last);
        for (int r = 0; r < left; ++r) {
          std::memcpy(out + (i + r) * stride, last + r * kKeys, kKeys * sizeof(float));
        }
        i = rows;
      }
    }
    written_for_tiles(keys);  // and read: what comes next stays behind
  }

  // All 16 rows, whatever `rows` says: behind the last are zeros, and room in acc.
  static void values(const std::uint16_t* p, int /*rows*/, const std::uint16_t* v, int steps,
                     int groups, bool is_first, float* acc, int head_dim) {
    written_for_tiles(p);
    written_for_tiles(v);
    for (int group = 0; group < groups; group += 4) {
      with_constant<4>(min_of(groups - group, 4), [&](auto n) {
        value_tiles<n>(p, v + group * 2 * kTile, steps, std::int64_t{groups} * 2 * kTile, is_first,
                       acc + group * kAmxRows, head_dim);
      });
    }
    written_for_tiles(acc);
    written_for_tiles(p);  // and read
  }
};

}  // namespace

const AttentionKernels& attention_kernels_amx() {
  static const AttentionKernels kernels = narrow_kernels<Tiles>();
  return kernels;
}

}  // namespace specdec::cpu
