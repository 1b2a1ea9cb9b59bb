// What the files of LlamaDecoder share.
#pragma once

#include <cstdint>

namespace specdec::cpu {

// Rows of scores kept at a time when the greedy id has to be taken behind a soft cap.
inline constexpr std::int64_t kCappedRows = 16;
inline constexpr std::int64_t kCacheLineBytes = 64;

}  // namespace specdec::cpu
