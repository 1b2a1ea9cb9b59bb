// What the files of LlamaDecoder share.
#pragma once

#include <cstdint>

namespace specdec::cpu {

// Rows of scores kept at a time when the greedy id has to be taken behind a soft cap.
inline constexpr std::int64_t kCappedRows = 16;
inline constexpr std::int64_t kCacheLineBytes = 64;

// A thread's contiguous share of n things.
struct Share {
  std::int64_t begin, end;
};
inline Share share(std::int64_t n, int rank, int nranks) {
  return {n * rank / nranks, n * (rank + 1) / nranks};
}

}  // namespace specdec::cpu
