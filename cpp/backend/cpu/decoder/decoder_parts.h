// What the files of LlamaDecoder share.
#pragma once

#include <cstdint>

namespace specdec::cpu {

// Rows of scores kept at a time when the greedy id has to be taken behind a soft cap.
inline constexpr std::int64_t kCappedRows = 16;
// From row to row of a buffer: an odd number of cache lines, so that the rows of a tile do not fall
// into the same sets of a cache.
constexpr std::int64_t odd_lines(std::int64_t bytes) {
  constexpr std::int64_t kLineBytes = 64;
  return ((bytes + kLineBytes - 1) / kLineBytes | 1) * kLineBytes;
}
constexpr std::int64_t floats_of_odd_lines(std::int64_t floats) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(float));
  return odd_lines(floats * kBytes) / kBytes;
}

}  // namespace specdec::cpu
