// The arithmetic of speculative attention on tensor cores: which keys a row sums together and in
// what order. Every accelerator kernel follows it, and it is the whole reason why a row at position
// p has the same bits whether its path is committed or still a draft (docs/exactness.md).
//
// Keys of a row at absolute position p, lowest visible position `lo` (sliding window, else 0; 0 too
// where the window begins among the sink tokens or right behind them):
//   main   positions [lo, W) with W = tail_begin(p, D). All of them are committed for every tree,
//          because no node is deeper than D: slot = position. Tensor cores, in blocks of kBlockKeys
//          at fixed absolute positions, online softmax within a chunk.
//   tail   positions [max(lo, W), p]: committed tokens, then the row's path, one key at a time in
//          position order, in float32 without tensor cores.
// Sink tokens in front of lo, positions [0, min(S, lo)), are keys as well: those below W are main,
// the others the first of the tail.
// Chunks lie at fixed absolute positions too (chunk_begin), each starts from an empty state, and a
// row's result is the left fold over its chunks in ascending order. Which block computes a chunk is
// scheduling; it does not change a bit. A key that a row may not see contributes an exact zero.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace specdec::attention {

inline constexpr std::int32_t kBlockKeys = 64;

// W(p) is a multiple of the granule: the number of keys that one matrix instruction sums at once,
// so that the keys of an instruction are all main or all masked. 16 for 16-bit operands, 32 for
// fp8.
inline constexpr std::int32_t kGranule16Bit = 16;
inline constexpr std::int32_t kGranuleFp8 = 32;

SPECDEC_HD inline std::int32_t tail_begin(std::int32_t position, std::int32_t max_depth,
                                          std::int32_t granule) {
  const std::int32_t committed = position - max_depth;
  return committed <= 0 ? 0 : committed / granule * granule;
}

// What a row sees besides sink tokens. Positions equal slots below main_end in exact mode; see
// `kernel` files for the draft columns of fast mode.
struct RowKeys {
  std::int32_t main_begin, main_end;  // main keys; empty if main_begin >= main_end
  std::int32_t tail_begin, tail_end;  // tail positions; tail_end = position + 1
};

// The first position that a row at `position` sees: of its window, and not in front of first_key.
// Sink tokens are seen, too: they lie apart where the result is greater than their number.
SPECDEC_HD inline std::int32_t first_visible(std::int32_t position, std::int32_t sliding_window,
                                             std::int32_t sink_tokens, std::int32_t first_key) {
  const std::int32_t oldest = position + 1 - sliding_window;
  const bool inside = sliding_window > 0 && oldest > first_key && oldest > sink_tokens;
  return inside ? oldest : first_key;
}

SPECDEC_HD inline RowKeys exact_row_keys(std::int32_t position, std::int32_t max_depth,
                                         std::int32_t granule, std::int32_t sliding_window,
                                         std::int32_t sink_tokens, std::int32_t first_key) {
  const std::int32_t lo = first_visible(position, sliding_window, sink_tokens, first_key);
  const std::int32_t w = tail_begin(position, max_depth, granule);
  return {lo, w, lo > w ? lo : w, position + 1};
}

// Chunk boundaries: 256 keys each below 2048, 512 below 8192, 1024 below 32768, then 2048. Short
// contexts split finely enough to fill the device; long ones do not drown in partial results.
SPECDEC_HD inline std::int32_t chunk_begin(std::int32_t chunk) {
  if (chunk <= 8) return chunk * 256;
  if (chunk <= 20) return 2048 + (chunk - 8) * 512;
  if (chunk <= 44) return 8192 + (chunk - 20) * 1024;
  return 32768 + (chunk - 44) * 2048;
}

// The chunk that holds a position.
SPECDEC_HD inline std::int32_t chunk_of(std::int32_t position) {
  if (position < 2048) return position / 256;
  if (position < 8192) return 8 + (position - 2048) / 512;
  if (position < 32768) return 20 + (position - 8192) / 1024;
  return 44 + (position - 32768) / 2048;
}

}  // namespace specdec::attention
